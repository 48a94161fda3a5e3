// SPDX-License-Identifier: Apache-2.0
#pragma once

// Emulated compute: layers that sleep for the time in their LayerCost instead of computing. They
// hold real parameters, scaled down so that a large model fits a laptop. They send real messages,
// with the bytes of each step.
//
// Thus a few cores run many ranks of a large model, through the real engine, transport, planner and
// migration. Losses are 0 and mean nothing.

#include <cstdint>
#include <functional>
#include <memory>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

struct EmulatedOptions {
  // Bytes held for each byte of LayerCost::parameter_bytes, in (0, 1]. Gradients and moments
  // follow.
  double memory_scale = 1;
  // Returns the costs of a step. Any thread may call it. Must keep the number of layers.
  std::function<cost::ModelCost(std::int64_t step)> costs;
};

// Makes one layer for each of costs(0), under its name. A layer sleeps to within the timer's
// accuracy (tens of microseconds). update_s is not emulated: an update takes the time of the scaled
// parameters.
//
// Returns kBadInput if costs(0) is no valid model, or if a scale is outside its range.
[[nodiscard]] Expected<Model> make_emulated(EmulatedOptions options);

// Returns the shape of the largest hidden tensor of a step. The output of a layer has the floats
// that fit its LayerCost::boundary_bytes in the step, and at least one (output_shape.h).
[[nodiscard]] std::vector<std::int64_t> emulated_boundary(const cost::ModelCost& costs);

}  // namespace dynmo::model
