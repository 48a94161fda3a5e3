// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/early_exit/load.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/dynamism/dense_impl.h"
#include "dynmo/dynamism/drift_impl.h"
#include "dynmo/dynamism/source_entry.h"

namespace dynmo::dynamism {
namespace {

enum ExitDraw : std::uint64_t {
  kExitHazard = 0x45584954,
  kExitDrift,
  kExitBatch
};  // keys of this model

// Returns -log(rho) behind the last exit. It is 0 in the warm-up and then tends to its final value.
double whole_hazard(const EarlyExitOptions& p, std::int64_t step) {
  return -std::log(scheduled_survivors(p, step, 1, 1));
}

// Returns, for each block, the share of the whole hazard at the exit behind it.
std::vector<double> hazards(const EarlyExitOptions& p, int blocks, std::uint64_t seed,
                            std::int64_t step) {
  std::vector<double> hazard(static_cast<std::size_t>(blocks), 0.0);
  const double position = static_cast<double>(step) / static_cast<double>(p.drift_steps);
  double sum = 0;
  for (int b = 0; b < blocks; ++b) {
    if (!has_exit(p, b, blocks)) continue;
    const auto id = static_cast<std::uint64_t>(b);
    const double own = p.exit_spread * Rng(mix_key({kExitHazard, seed, id})).normal();
    const double moved = p.drift * drift(mix_key({kExitDrift, seed, id}), position);
    sum += hazard[id] = std::exp(own + moved);
  }
  for (double& one : hazard) one /= std::max(sum, 1e-300);
  return hazard;
}

class EarlyExit final : public LoadModel {
 public:
  EarlyExit(const EarlyExitOptions& options, DenseModel dense, const LoadInputs& inputs)
      : options_(options),
        dense_(std::move(dense)),
        seed_(inputs.seed),
        step_tokens_(inputs.shape.tokens() * inputs.micro_batches) {}

  cost::ModelCost at(std::int64_t step) const override {
    return costs(survivors(options_, dense_.shape.blocks, step_tokens_, seed_, step));
  }

  cost::ModelCost costs(const std::vector<double>& rho) const {
    cost::ModelCost model;
    for (int layer = 0; layer < dense_.size(); ++layer) {
      const int block = dense_.block[static_cast<std::size_t>(layer)];
      if (block != kNoBlock) {
        add_block(layer, rho[static_cast<std::size_t>(block)],
                  rho[static_cast<std::size_t>(block) + 1], model);
      } else if (dense_.kind(layer) == cost::LayerKind::kHead) {
        model.layers.push_back(head_cost(layer, rho.back()));
      } else {
        model.layers.push_back(dense_.costs.layers[static_cast<std::size_t>(layer)]);
      }
    }
    return model;
  }

  bool counts_work() const override { return true; }

 private:
  bool propagated() const { return options_.exited == ExitedTokens::kPropagated; }

  // Returns the share of a sublayer's products and stash if `rho` of the tokens are left.
  double product_share(int layer, double rho) const {
    if (!propagated() || dense_.kind(layer) != cost::LayerKind::kAttention) return rho;
    const auto& shape = dense_.shape;
    const double keys = 2 * static_cast<double>(shape.kv_heads);
    const double keys_share = keys / (2 * static_cast<double>(shape.heads) + keys);
    return keys_share + (1 - keys_share) * rho;
  }

  // Adds a half block. The share `rho` of the tokens enters its block, and the share `after` is
  // left behind its exit (the same without an exit).
  void add_block(int layer, double rho, double after, cost::ModelCost& model) const {
    const bool attention = dense_.kind(layer) == cost::LayerKind::kAttention;
    cost::LayerWork work = dense_.work[static_cast<std::size_t>(layer)];
    const double share = product_share(layer, rho);
    work.matrix_flops *= share;
    work.activation_bytes *= share;
    work.moved_bytes *= share;
    work.core_flops *= propagated() ? rho : rho * rho;
    const int block = dense_.block[static_cast<std::size_t>(layer)];
    if (attention || !has_exit(options_, block, dense_.shape.blocks)) {
      scale_boundary(work, rho);
      model.layers.push_back(dense_.cost_of(work));
      return;
    }
    const double hidden_bytes = work.boundary_bytes;
    const auto slices = static_cast<int>(dense_.shape.head_slices);
    for (int slice = 0; slice < slices; ++slice) {
      if (slice > 0) {
        work = {};
        work.name = fmt::format("blocks.{}.exit.{} of {}", block, slice, slices);
      }
      const bool last = slice + 1 == slices;
      add_exit(work, dense_.work[static_cast<std::size_t>(dense_.size() - slices + slice)], rho,
               after, last);
      work.boundary_bytes = last ? hidden_bytes : passed_bytes();
      scale_boundary(work, last ? after : rho);
      model.layers.push_back(dense_.cost_of(work));
    }
  }

  // Returns the bytes between two slices of an exit: 2 x hidden + 6 numbers a token, in fp32.
  double passed_bytes() const {
    constexpr double kFloat = 4;
    return kFloat * static_cast<double>(dense_.shape.tokens()) *
           (2 * static_cast<double>(dense_.shape.hidden) + 6);
  }

  // Adds the work of an exit with `head`, or with a slice of it.
  void add_exit(cost::LayerWork& work, const cost::LayerWork& head, double rho, double after,
                bool last) const {
    const auto tokens = static_cast<double>(dense_.shape.tokens());
    const auto hidden = static_cast<double>(dense_.shape.hidden);
    const bool sliced = dense_.shape.head_slices > 1;
    // The head learns from all incoming tokens if staying ones have a loss. The classifier learns
    // from the head's correctness. The head runs for all tokens if its own scores decide.
    const bool learns =
        options_.exit_loss > 0 || options_.confidence == ExitConfidence::kClassifier;
    const bool asked = learns || options_.confidence == ExitConfidence::kGap;
    const double forward = asked ? rho : rho - after;
    const double back = learns ? rho : rho - after;
    const double share = (forward + 2 * back) / 3;  // F, I and W are one product each
    work.matrix_flops += share * head.matrix_flops;
    if (last) work.matrix_flops += 2 * rho * tokens * hidden;  // the classifier or the similarity
    work.moved_bytes += share * head.moved_bytes;
    work.activation_bytes += (sliced ? forward : back) * head.activation_bytes;
    work.parameters += head.parameters + head.copied_parameters;
    work.product_parameters += head.product_parameters;
  }

  void scale_boundary(cost::LayerWork& work, double rho) const {
    if (propagated()) return;
    constexpr double kIndex = 4;  // bytes
    const double index = rho < 1 ? kIndex * static_cast<double>(dense_.shape.tokens()) : 0;
    work.boundary_bytes = rho * (work.boundary_bytes + index);
  }

  cost::LayerCost head_cost(int layer, double rho) const {
    cost::LayerWork work = dense_.work[static_cast<std::size_t>(layer)];
    work.matrix_flops *= rho;
    work.moved_bytes *= rho;
    work.activation_bytes *= rho;
    if (work.boundary_bytes > 0) scale_boundary(work, rho);
    return dense_.cost_of(work);
  }

  EarlyExitOptions options_;
  DenseModel dense_;
  std::uint64_t seed_;
  std::int64_t step_tokens_;
};

}  // namespace

std::vector<double> survivors(const EarlyExitOptions& options, int blocks, std::int64_t tokens,
                              std::uint64_t seed, std::int64_t step) {
  DYNMO_CHECK(check(options).has_value(), "valid early-exit options");
  DYNMO_CHECK(blocks >= 1 && tokens >= 1 && step >= 0, "blocks, tokens, a step; got {}, {}, {}",
              blocks, tokens, step);
  const double whole = whole_hazard(options, step);
  const std::vector<double> hazard = hazards(options, blocks, seed, step);
  const auto counted = static_cast<double>(tokens);
  std::vector<double> rho = {1};
  double passed = 0;
  for (int b = 0; b < blocks; ++b) {
    const auto id = static_cast<std::uint64_t>(b);
    passed += hazard[id];
    const double mean = std::exp(-whole * passed);
    double noise = 0;
    if (hazard[id] > 0) {
      const auto key = mix_key({kExitBatch, seed, id, static_cast<std::uint64_t>(step)});
      noise = std::sqrt(mean * (1 - mean) / counted) * step_noise(key);
    }
    const double next = hazard[id] > 0 ? mean + noise : rho.back();
    rho.push_back(std::clamp(next, 0.0, rho.back()));
  }
  return rho;
}

Expected<std::unique_ptr<LoadModel>> make_early_exit(const EarlyExitOptions& options,
                                                     const LoadInputs& inputs) {
  DYNMO_TRY(check(options));
  DYNMO_ASSIGN(DenseModel dense, make_dense("early_exit", inputs));
  return std::unique_ptr<LoadModel>(std::make_unique<EarlyExit>(options, std::move(dense), inputs));
}

Expected<cost::ModelCost> early_exit_costs(const EarlyExitOptions& options,
                                           const LoadInputs& inputs,
                                           const std::vector<double>& rho) {
  DYNMO_TRY(check(options));
  DYNMO_ASSIGN(DenseModel dense, make_dense("early_exit", inputs));
  DYNMO_CHECK(std::ssize(rho) == dense.shape.blocks + 1, "{} shares, got {}",
              dense.shape.blocks + 1, rho.size());
  return EarlyExit(options, std::move(dense), inputs).costs(rho);
}

SourceEntry early_exit_source() {
  return source_entry<EarlyExitOptions, make_early_exit>("early_exit");
}

}  // namespace dynmo::dynamism
