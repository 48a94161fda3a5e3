// SPDX-License-Identifier: Apache-2.0
#pragma once

// The events at which a training prunes, the same for single weights and for whole units.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/dynamism/pruning/options.h"
#include "dynmo/dynamism/pruning/select.h"
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

// The stds by which weights of different matrices are compared. They are those of the distributions
// from which the matrices were drawn. If a run began with given weights, they are measured before
// its first step and stored, because training changes the weights.
class InitialStd {
 public:
  explicit InitialStd(Magnitude magnitude) : magnitude_(magnitude) {}

  // Measures the stds if this is the first step of a run that began with given weights. All ranks
  // call it. Fails with kPeerLost.
  [[nodiscard]] Expected<void> measure_if_imported(const Boundary& boundary);
  // Returns the std of a matrix, or 1 for raw magnitudes.
  [[nodiscard]] Expected<float> of(std::size_t number, const model::ParameterSpec& spec) const;

  [[nodiscard]] Json state() const;  // null: nothing was measured
  [[nodiscard]] Expected<void> restore(const Json& state);

 private:
  Magnitude magnitude_;
  std::vector<float> measured_;  // by number of the matrix; empty: the nominal ones
};

// The part that both forms of pruning share. The result of an event is a function of the step, the
// weights and the sums over the ranks. The masks are in the layers' states.
class PruningEvents : public Source {
 public:
  explicit PruningEvents(const PruningOptions& options);
  [[nodiscard]] std::string_view name() const override { return "pruning"; }
  [[nodiscard]] Expected<Change> before_step(const Boundary& boundary) final;
  [[nodiscard]] Json figures() const final;
  [[nodiscard]] std::string progress() const final;
  [[nodiscard]] Json state() const override { return initial_std_.state(); }
  [[nodiscard]] Expected<void> restore(const Json& state) override {
    return initial_std_.restore(state);
  }

 protected:
  // Prunes and derives the states of this rank. Returns the masks of its matrices, or units, that
  // train; nullopt if all layers of the model are frozen.
  using Masks = std::optional<std::vector<MatrixMask>>;
  [[nodiscard]] virtual Expected<Masks> prune(const Boundary& boundary) = 0;

  PruningOptions options_;
  InitialStd initial_std_;
  Json left_ = nullptr;  // units after the newest event, by kind; null: none are counted

 private:
  std::int64_t step_ = 0;  // the newest asked for
  std::string masks_;      // digest of all that train, if that step is an event
};

// Makes the source that prunes single weights. make_unit_pruning() makes that of whole units.
[[nodiscard]] std::unique_ptr<Source> make_weight_pruning(const PruningOptions& options);
[[nodiscard]] std::unique_ptr<Source> make_unit_pruning(const PruningOptions& options);

}  // namespace dynmo::dynamism
