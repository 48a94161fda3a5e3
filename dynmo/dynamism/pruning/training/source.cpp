// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/pruning/load.h"
#include "dynmo/dynamism/pruning/select.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/kernels/sparse_break_even.h"
#include "dynmo/model/pruned.h"

namespace dynmo::dynamism {
namespace {

// A matrix of this rank that trains.
struct Own {
  std::size_t number = 0;  // among all matrices of the model that may be pruned
  model::LayerState* layer = nullptr;
  std::size_t parameter = 0;
  model::ParameterSpec spec;
  at::Tensor kept;  // values, in host memory
  [[nodiscard]] std::int64_t weights() const { return spec.shape[0] * spec.shape[1]; }
};

// The std of the distribution that a matrix is drawn from.
float nominal_std(const model::ParameterSpec& spec) {
  return spec.init_std > 0 ? static_cast<float>(spec.init_std) : 1.0F;
}

// The root mean square of a matrix's weights, summed in their order, so that it has the same bits
// everywhere. A matrix of zeros has no scale of its own.
float measured_std(const Own& matrix) {
  const at::Tensor kept = matrix.kept.contiguous();
  const std::span weights(kernels::host_data<const float>(kept),
                          static_cast<std::size_t>(kept.numel()));
  double squares = 0;
  for (const float w : weights) squares += static_cast<double>(w) * static_cast<double>(w);
  const auto std = static_cast<float>(std::sqrt(squares / static_cast<double>(matrix.weights())));
  return std > 0 && std::isfinite(std) ? std : nominal_std(matrix.spec);
}

// The result of an event is a function of the step, the weights and the sums over the ranks. The
// masks are in the layers' states. If a run began with given weights, the source stores their std,
// which cannot be recovered after training.
class PruningSource final : public Source {
 public:
  explicit PruningSource(const PruningOptions& options) : options_(options) {
    const auto valid = dynamism::check(options);
    DYNMO_CHECK(valid.has_value(), "valid options: {}", valid.error().message);
  }

  std::string_view name() const override { return "pruning"; }

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

  Json figures() const override {
    Json figures = {{"sparsity", sparsity_at(options_, step_)}};
    if (!masks_.empty()) figures["masks"] = masks_;
    return figures;
  }

  std::string progress() const override {
    return fmt::format("pruned {:.1f} %", 100 * sparsity_at(options_, step_));
  }

  Expected<Change> before_step(const Boundary& boundary) override {
    step_ = boundary.step;
    masks_.clear();
    if (boundary.step == 0 && boundary.imported && options_.magnitude == Magnitude::kScaled) {
      DYNMO_TRY(measure_initial_std(boundary));
    }
    if (!is_event(boundary.step)) return Change{};
    std::vector<Own> own = own_matrices(boundary, Layers::kTrained);
    DYNMO_ASSIGN(const Pool pool, pool_of(own, boundary));
    if (pool.matrices == 0) return Change{};  // all are frozen
    std::vector<PoolMatrix> matrices;
    for (const Own& matrix : own) {
      DYNMO_ASSIGN(const float std, initial_std(matrix));
      matrices.push_back({.index = pool.index[matrix.number],
                          .weights = matrix.weights(),
                          .std = std,
                          .kept = {kernels::host_data<const float>(matrix.kept),
                                   static_cast<std::size_t>(matrix.kept.numel())}});
    }
    DYNMO_ASSIGN(const Selection selection,
                 keep_largest(event_at(options_, boundary.step, pool.matrices, pool.weights),
                              matrices, boundary.sum));
    for (std::size_t i = 0; i < own.size(); ++i) {
      prune(own[i], selection.stay[i], *boundary.model[own[i].layer->id.index()]);
    }
    for (auto& [id, state] : boundary.states) model::derive(*boundary.model[id.index()], state);
    DYNMO_ASSIGN(const Digest digest, digest_of_masks(masks_of(own, pool), boundary.sum));
    masks_ = digest.hex();
    return Change{.sizes = true};
  }

  Json state() const override {
    if (initial_std_.empty()) return nullptr;
    return {{"initial_std", initial_std_}};
  }

  Expected<void> restore(const Json& state) override {
    const auto found = state.find("initial_std");
    const auto is_std = [](const Json& x) { return x.is_number() && x.get<float>() > 0; };
    if (found == state.end() || !found->is_array() || !std::ranges::all_of(*found, is_std)) {
      return make_error(ErrorCode::kBadInput,
                        "the checkpoint holds a state of source 'pruning' without initial_std, "
                        "wanted an array of numbers above 0");
    }
    initial_std_ = found->get<std::vector<float>>();
    return {};
  }

 private:
  enum class Layers { kTrained, kAll };

  struct Pool {
    std::vector<std::int64_t> index;  // by number of the matrix
    std::int64_t matrices = 0;
    std::int64_t weights = 0;
  };

  bool is_event(std::int64_t step) const {
    return step >= options_.start && step <= options_.end &&
           (step - options_.start) % options_.every == 0 && sparsity_at(options_, step) > 0;
  }

  // Alike on all ranks, each of which has some of the matrices.
  Expected<void> measure_initial_std(const Boundary& boundary) {
    std::vector<std::int64_t> bits;
    for (const auto& layer : boundary.model) {
      for (const model::ParameterSpec& spec : layer->parameters()) {
        if (spec.prunable) bits.push_back(0);
      }
    }
    for (const Own& matrix : own_matrices(boundary, Layers::kAll)) {
      bits[matrix.number] = std::bit_cast<std::int32_t>(measured_std(matrix));
    }
    DYNMO_ASSIGN(bits, boundary.sum(std::move(bits)));
    initial_std_.clear();
    for (const std::int64_t all : bits) {
      initial_std_.push_back(std::bit_cast<float>(static_cast<std::int32_t>(all)));
    }
    return {};
  }

  [[nodiscard]] Expected<float> initial_std(const Own& matrix) const {
    if (options_.magnitude != Magnitude::kScaled) return 1.0F;
    if (initial_std_.empty()) return nominal_std(matrix.spec);
    if (matrix.number < initial_std_.size()) return initial_std_[matrix.number];
    return make_error(ErrorCode::kBadInput,
                      "the state of source 'pruning' has the std of {} matrices, but the model has "
                      "more; wanted the checkpoint of this model",
                      initial_std_.size());
  }

  static std::vector<Own> own_matrices(const Boundary& boundary, Layers layers) {
    std::vector<Own> own;
    std::size_t number = 0;
    for (std::size_t l = 0; l < boundary.model.size(); ++l) {
      const auto found = boundary.states.find(LayerId(static_cast<std::int32_t>(l)));
      const std::vector<model::ParameterSpec> specs = boundary.model[l]->parameters();
      for (std::size_t p = 0; p < specs.size(); ++p) {
        if (!specs[p].prunable) continue;
        ++number;
        if (found == boundary.states.end()) continue;
        if (layers == Layers::kTrained && found->second.frozen) continue;
        own.push_back(
            {.number = number - 1,
             .layer = &found->second,
             .parameter = p,
             .spec = specs[p],
             .kept = model::kept_values(found->second.parameters[p]).to(at::kCPU, at::kFloat)});
      }
    }
    return own;
  }

  // The pool holds the layers of all ranks but the frozen ones.
  static Expected<Pool> pool_of(const std::vector<Own>& own, const Boundary& boundary) {
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

  // Compressed on the CPU where the layer computes in fp32 and the matrix has lost enough; for
  // good, as it only loses more.
  void prune(const Own& own, std::span<const std::int32_t> stay, const model::Layer& layer) const {
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

  PruningOptions options_;
  std::vector<float> initial_std_;  // by number of the matrix; empty: the nominal ones
  std::int64_t step_ = 0;           // the newest asked for
  std::string masks_;               // digest of all that train, where it was one of an event
};

}  // namespace

std::unique_ptr<Source> pruning_in_training(const SourceOptions& options, std::int64_t) {
  return make_pruning_source(options.get<PruningOptions>());
}

std::unique_ptr<Source> make_pruning_source(const PruningOptions& options) {
  return std::make_unique<PruningSource>(options);
}

}  // namespace dynmo::dynamism
