// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a source of dynamism does to the costs of a model while training runs, for the simulator: a
// function from the step to the cost of every layer.

#include <cstdint>

#include "dynmo/cost/layer_cost.h"

namespace dynmo::dynamism {

// Deterministic: costs are a function of the parameters, the seed and the step, and steps may be
// asked in any order, so that every policy of a comparison sees the same load. One thread at a
// time: an implementation may keep what it has computed.
class LoadModel {
 public:
  virtual ~LoadModel() = default;
  // Costs of step `step` >= 0, on a rank of speed 1.
  [[nodiscard]] virtual cost::ModelCost at(std::int64_t step) const = 0;
  // Whether training itself has changed the model between `step` - 1 and `step` (layers frozen,
  // weights pruned), so that a policy is told; false for drift that only the costs show.
  [[nodiscard]] virtual bool changes_at(std::int64_t step) const = 0;
};

}  // namespace dynmo::dynamism
