// SPDX-License-Identifier: Apache-2.0
#pragma once

// A load model describes how a source of dynamism changes the costs of a model during training, for
// the simulator. It is a function from the step to the cost of every layer.

#include <cstdint>
#include <vector>

#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/layer_sample.h"

namespace dynmo::dynamism {

struct Recording;

// The costs of a model by step. Deterministic: costs are a function of the parameters, the seed and
// the step. Steps may be requested in any order, so every policy of a comparison sees the same
// load. One thread at a time: an implementation may cache results.
class LoadModel {
 public:
  virtual ~LoadModel() = default;
  // Returns the costs of step `step` >= 0, on a rank of speed 1.
  [[nodiscard]] virtual cost::ModelCost at(std::int64_t step) const = 0;
  // Returns the change that training itself makes between `step` - 1 and `step`, to announce it to
  // a controller. Returns kNothing if only the costs drift.
  [[nodiscard]] virtual cost::Announced announced_at(std::int64_t /*step*/) const {
    return cost::Announced::kNothing;
  }
  // Returns whether training counts the work of its layers in every step: rows, pairs, tokens an
  // expert.
  [[nodiscard]] virtual bool counts_work() const { return false; }
  // Returns the measurements of the training run that had this load (recording.h). Returns null for
  // any other load, or if the run did not record every step.
  [[nodiscard]] virtual const Recording* recording() const { return nullptr; }
  // Returns the steps that a file has lines of, ascending, or none if the load is computed.
  [[nodiscard]] virtual std::vector<std::int64_t> recorded_steps() const { return {}; }
};

}  // namespace dynmo::dynamism
