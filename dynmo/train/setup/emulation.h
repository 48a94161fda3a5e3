// SPDX-License-Identifier: Apache-2.0
#pragma once

// The emulated model of a config (run.device = "emulated"): which costs its layers sleep for.

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
  dynamism::MakeSources make_sources;  // one, which announces the changes of a trace
  // The layers sleep for these costs: nothing in updates, which are real, and all of them train.
  GivenCosts costs;
};

// `dense`: as in the first step of the trace, in all steps. kBadInput: the profile or trace cannot
// be read or is none (file and place are named).
[[nodiscard]] Expected<EmulatedModel> emulated_model(const config::Config& config, bool dense);

// Returns the costs of its layers in the first step.
[[nodiscard]] Expected<cost::ModelCost> emulated_costs(const config::Config& config);

}  // namespace dynmo::train
