// SPDX-License-Identifier: Apache-2.0
#pragma once

// Emulated compute: layers that hold real parameters (scaled down, so that a large model fits a
// laptop) and pass on real messages of the bytes of each step, but compute by sleeping for the time
// their LayerCost says.
// Many ranks of a large model then run on few cores, through the real engine, transport, planner
// and migration. Losses mean nothing and are 0.

#include <cstdint>
#include <functional>
#include <memory>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

struct EmulatedOptions {
  // Bytes held for each byte of LayerCost::parameter_bytes, in (0, 1]; gradients and moments
  // follow.
  double memory_scale = 1;
  // Costs of a step; any thread may call it. Must keep the number of layers.
  std::function<cost::ModelCost(std::int64_t step)> costs;
};

// One layer for each of costs(0), under its name. Times are slept to within the timer's accuracy
// (tens of microseconds); update_s is not emulated: updates take what the scaled parameters take.
// kBadInput: costs(0) is no valid model, a scale outside its range.
[[nodiscard]] Expected<Model> make_emulated(EmulatedOptions options);

// Shape of the largest hidden tensor of a step. What passes behind a layer has as many floats as
// its LayerCost::boundary_bytes holds in the step, at least one (output_shape.h).
[[nodiscard]] std::vector<std::int64_t> emulated_boundary(const cost::ModelCost& costs);

}  // namespace dynmo::model
