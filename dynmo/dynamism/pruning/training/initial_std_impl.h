// SPDX-License-Identifier: Apache-2.0
#pragma once

// The stds by which weights of different matrices are compared. They are those of the distributions
// that the matrices were drawn from. If a run began with given weights, they are measured before
// its first step, and stored, as they cannot be recovered after training.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/dynamism/pruning/options.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/layer.h"

namespace dynmo::dynamism {

// A matrix of this rank that may be pruned.
struct OwnMatrix {
  std::size_t number = 0;  // among all matrices of the model that may be pruned
  model::LayerState* layer = nullptr;
  std::size_t parameter = 0;
  model::ParameterSpec spec;
  [[nodiscard]] std::int64_t weights() const { return spec.shape[0] * spec.shape[1]; }
};

enum class OwnLayers { kTrained, kAll };
[[nodiscard]] std::vector<OwnMatrix> own_matrices(const Boundary& boundary, OwnLayers layers);

// Returns the weights that a matrix still has, fp32, in host memory.
[[nodiscard]] at::Tensor weights_on_host(const OwnMatrix& matrix);

class InitialStd {
 public:
  explicit InitialStd(Magnitude magnitude) : magnitude_(magnitude) {}

  // Measures them if this is the first step of a run that began with given weights. Called by all
  // ranks alike.
  [[nodiscard]] Expected<void> measure_if_imported(const Boundary& boundary);
  // Returns the std of a matrix, or 1 for raw magnitudes.
  [[nodiscard]] Expected<float> of(std::size_t number, const model::ParameterSpec& spec) const;

  [[nodiscard]] Json state() const;  // null: nothing was measured
  [[nodiscard]] Expected<void> restore(const Json& state);

 private:
  Magnitude magnitude_;
  std::vector<float> measured_;  // by number of the matrix; empty: the nominal ones
};

// Returns whether the schedule has an event before `step`.
[[nodiscard]] bool is_pruning_event(const PruningOptions& options, std::int64_t step);

// Makes the source of each form.
[[nodiscard]] std::unique_ptr<Source> make_weight_pruning(const PruningOptions& options);
[[nodiscard]] std::unique_ptr<Source> make_unit_pruning(const PruningOptions& options);

}  // namespace dynmo::dynamism
