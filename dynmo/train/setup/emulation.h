// SPDX-License-Identifier: Apache-2.0
#pragma once

// The emulated model of a config (run.device = "emulated"), whose layers sleep for given costs.

#include <cstdint>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/layer.h"
#include "dynmo/train/setup/comparison.h"

namespace dynmo::train {

struct EmulatedModel {
  model::Model layers;
  std::vector<std::int64_t> boundary_shape;
  dynamism::MakeSources make_sources;  // one source, which announces the changes of a trace
  // The costs that the layers sleep for. All layers train, and updates are real, so their cost is 0
  // here.
  GivenCosts costs;
};

// Makes the model. With `dense`, all steps have the costs of the trace's first step. Returns
// kBadInput with file and place if the profile or trace cannot be read.
[[nodiscard]] Expected<EmulatedModel> emulated_model(const config::Config& config, bool dense);

// Returns the costs of its layers in the first step.
[[nodiscard]] Expected<cost::ModelCost> emulated_costs(const config::Config& config);

}  // namespace dynmo::train
