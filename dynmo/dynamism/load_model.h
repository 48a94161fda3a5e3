// SPDX-License-Identifier: Apache-2.0
#pragma once

// A load model says how a source of dynamism changes the costs of a model while training runs, for
// the simulator: a function from the step to the cost of every layer.

#include <cstdint>
#include <vector>

#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/layer_sample.h"

namespace dynmo::dynamism {

// Deterministic: costs are a function of the parameters, the seed and the step, and steps may be
// asked in any order, so that every policy of a comparison sees the same load. One thread at a
// time: an implementation may keep what it has computed.
struct Recording;

class LoadModel {
 public:
  virtual ~LoadModel() = default;
  // Costs of step `step` >= 0, on a rank of speed 1.
  [[nodiscard]] virtual cost::ModelCost at(std::int64_t step) const = 0;
  // Returns the change that training itself makes between `step` - 1 and `step`, so that a
  // controller is told; kNothing where only the costs drift.
  [[nodiscard]] virtual cost::Announced announced_at(std::int64_t step) const = 0;
  // Whether training counts the work of its layers in every step: rows, pairs, tokens an expert.
  [[nodiscard]] virtual bool counts_work() const { return false; }
  // Returns the measurements of the training run that had this load (recording.h); null: it is from
  // no run, or from one that did not write down every step.
  [[nodiscard]] virtual const Recording* recording() const { return nullptr; }
  // Returns the steps that a file has lines of, ascending; none: the load is computed.
  [[nodiscard]] virtual std::vector<std::int64_t> recorded_steps() const { return {}; }
};

}  // namespace dynmo::dynamism
