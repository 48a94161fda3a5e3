// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/pruning/load.h"
#include "dynmo/dynamism/pruning/select.h"
#include "dynmo/dynamism/pruning/training/events_impl.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/kernels/sparse_break_even.h"
#include "dynmo/model/pruned.h"

namespace dynmo::dynamism {
namespace {

// A training matrix of this rank, and its kept weights.
struct Own : OwnMatrix {
  at::Tensor kept;  // values, in host memory
};

class WeightPruning final : public PruningEvents {
 public:
  using PruningEvents::PruningEvents;

  Expected<void> check(const Setting& setting) const override {
    for (const auto& layer : setting.model) {
      for (const model::ParameterSpec& spec : layer->parameters()) {
        if (spec.prunable) return {};
      }
    }
    return make_error(ErrorCode::kBadInput,
                      "pruning.enabled is true, but no layer of the model has a matrix that may be "
                      "pruned");
  }

  std::vector<Measured> measure(const model::Model& model, std::int64_t tokens) const override {
    if (options_.sparse_above) return {};
    const std::vector<kernels::MatrixSize> matrices = model::compressible_matrices(model);
    if (matrices.empty()) {
      return {{.key = "sparse_above",
               .value = fmt::format("{}", kSparseAbove),
               .why = "as no layer computes in fp32, and all matrices stay masked"}};
    }
    return {{.key = "sparse_above",
             .value = fmt::format("{}", kernels::measure_break_even(matrices, tokens)),
             .why = "measured: from this sparsity on compressed products take no longer"}};
  }

 private:
  struct Pool {
    std::vector<std::int64_t> index;  // by number of the matrix
    std::int64_t matrices = 0;
    std::int64_t weights = 0;
    std::int64_t least = 0;  // weights that stay because of max_sparsity
  };

  Expected<Masks> prune(const Boundary& boundary) override {
    std::vector<Own> own;
    for (const OwnMatrix& matrix : own_matrices(boundary, OwnLayers::kTrained)) {
      own.push_back({matrix, weights_on_host(matrix)});
    }
    DYNMO_ASSIGN(const Pool pool, pool_of(own, boundary));
    if (pool.matrices == 0) return Masks();
    std::vector<PoolMatrix> matrices;
    for (const Own& matrix : own) {
      DYNMO_ASSIGN(const float std, initial_std_.of(matrix.number, matrix.spec));
      matrices.push_back({.index = pool.index[matrix.number],
                          .weights = matrix.weights(),
                          .std = std,
                          .kept = {kernels::host_data<const float>(matrix.kept),
                                   static_cast<std::size_t>(matrix.kept.numel())}});
    }
    PruningEvent event = event_at(options_, boundary.step, pool.matrices, pool.weights);
    // Each matrix rounds its least number up, so that their sum may exceed that of the schedule.
    if (weights_left(event.sparsity, event.weights) < pool.least) {
      event.sparsity = 1 - static_cast<double>(pool.least) / static_cast<double>(pool.weights);
    }
    DYNMO_ASSIGN(const Selection selection, keep_largest(event, matrices, boundary.sum));
    for (std::size_t i = 0; i < own.size(); ++i) {
      prune_matrix(own[i], selection.stay[i], *boundary.model[own[i].layer->id.index()]);
    }
    for (auto& [id, state] : boundary.states) model::derive(*boundary.model[id.index()], state);
    return Masks(masks_of(own, pool));
  }

  // Returns the pool of all ranks' matrices, without those of frozen layers.
  [[nodiscard]] Expected<Pool> pool_of(const std::vector<Own>& own,
                                       const Boundary& boundary) const {
    std::vector<std::int64_t> weights;
    for (const auto& layer : boundary.model) {
      for (const model::ParameterSpec& spec : layer->parameters()) {
        if (spec.prunable) weights.push_back(0);
      }
    }
    for (const Own& matrix : own) weights[matrix.number] = matrix.weights();
    DYNMO_ASSIGN(weights, boundary.sum(std::move(weights)));
    Pool pool;
    for (const std::int64_t count : weights) {
      pool.index.push_back(pool.matrices);
      pool.matrices += count > 0 ? 1 : 0;
      pool.weights += count;
      if (count > 0) pool.least += protected_weights(options_.max_sparsity, count);
    }
    return pool;
  }

  static std::vector<MatrixMask> masks_of(const std::vector<Own>& own, const Pool& pool) {
    std::vector<MatrixMask> masks;
    for (const Own& matrix : own) {
      const at::Tensor mask = matrix.layer->parameters[matrix.parameter].mask.cpu();
      const auto bits = model::mask_bits(mask);
      masks.push_back({.index = pool.index[matrix.number],
                       .weights = matrix.weights(),
                       .bits = {bits.begin(), bits.end()}});
    }
    return masks;
  }

  // Prunes a matrix. It becomes compressed on the CPU if the layer computes in fp32 and the matrix
  // has lost enough. It stays compressed, because it only loses more.
  void prune_matrix(const Own& own, std::span<const std::int32_t> stay,
                    const model::Layer& layer) const {
    model::Parameter& parameter = own.layer->parameters[own.parameter];
    const double sparsity =
        1 - static_cast<double>(stay.size()) / static_cast<double>(own.weights());
    DYNMO_CHECK(options_.sparse_above, "pruning.sparse_above to be measured before a step");
    const bool compressed = model::is_compressed(parameter) ||
                            (parameter.value.is_cpu() && layer.compute_type() == at::kFloat &&
                             sparsity > *options_.sparse_above);
    model::prune(parameter, own.spec, stay,
                 compressed ? model::MatrixFormat::kCompressed : model::MatrixFormat::kMasked);
  }
};

}  // namespace

std::unique_ptr<Source> make_weight_pruning(const PruningOptions& options) {
  return std::make_unique<WeightPruning>(options);
}

std::unique_ptr<Source> pruning_in_training(const SourceOptions& options, std::int64_t) {
  return make_pruning_source(options.get<PruningOptions>());
}

std::unique_ptr<Source> make_pruning_source(const PruningOptions& options) {
  return options.form == PruningForm::kUnits ? make_unit_pruning(options)
                                             : make_weight_pruning(options);
}

}  // namespace dynmo::dynamism
