// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/moe/load.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/dynamism/dense_impl.h"
#include "dynmo/dynamism/drift_impl.h"
#include "dynmo/dynamism/moe/load_counts.h"
#include "dynmo/dynamism/source_entry.h"

namespace dynmo::dynamism {
namespace {

constexpr std::int64_t kMaxExperts = 10'000'000;  // of the model
enum MoeDraw : std::uint64_t {
  kMoeSkew = 0x4D4F45,
  kMoeOrder,
  kMoeDrift,
  kMoeCounts
};  // keys of this model

Expected<void> check_shape(const MoeOptions& p, const cost::TransformerShape& shape) {
  if (shape.experts < 1) {
    return make_error(ErrorCode::kBadInput,
                      "moe: the shape has no experts, wanted a mixture-of-experts model");
  }
  if (shape.experts > kMaxExperts || shape.experts * shape.blocks > kMaxExperts) {
    return make_error(ErrorCode::kBadInput, "moe: {} experts in {} blocks, wanted at most {}",
                      shape.experts, shape.blocks, kMaxExperts);
  }
  if (shape.experts % p.expert_ranks != 0) {
    return make_error(ErrorCode::kBadInput,
                      "moe.expert_ranks is {}, wanted a divisor of the {} experts", p.expert_ranks,
                      shape.experts);
  }
  return {};
}

struct Phi {
  double mean = 1;
  double largest = 1;  // of the micro-batches
};

class Moe final : public LoadModel {
 public:
  Moe(const MoeOptions& options, std::optional<RecordedCounts> recorded, DenseModel dense,
      std::uint64_t seed)
      : options_(options),
        recorded_(std::move(recorded)),
        dense_(std::move(dense)),
        seed_(seed),
        experts_(static_cast<std::size_t>(dense_.shape.experts)) {
    tokens_ = static_cast<double>(dense_.shape.tokens()) * options_.expert_ranks;
    assignments_ = tokens_ * static_cast<double>(dense_.shape.experts_per_token);
    for (int layer = 0; layer < dense_.size(); ++layer) {
      orders_.push_back(order_of(layer));
      block_of_.push_back(blocks_);
      if (dense_.kind(layer) == cost::LayerKind::kMoe) ++blocks_;
    }
  }

  cost::ModelCost at(std::int64_t step) const override {
    cost::ModelCost model = dense_.costs;
    for (int layer = 0; layer < dense_.size(); ++layer) {
      if (dense_.kind(layer) != cost::LayerKind::kMoe) continue;
      model.layers[static_cast<std::size_t>(layer)] = cost_of(layer, phi(layer, step));
    }
    return model;
  }

  bool counts_work() const override { return true; }

 private:
  std::uint64_t key(MoeDraw draw, int layer, std::uint64_t more = 0) const {
    return mix_key({draw, seed_, static_cast<std::uint64_t>(layer), more});
  }

  // Returns each expert's place in the order of popularity.
  std::vector<std::size_t> order_of(int layer) const {
    std::vector<std::size_t> order(experts_);
    std::iota(order.begin(), order.end(), std::size_t{0});
    Rng rng(key(kMoeOrder, layer));
    for (std::size_t i = experts_; i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
    return order;
  }

  std::vector<double> popularity(int layer, std::int64_t step) const {
    const MoeOptions& p = options_;
    const double settled =
        p.min_skew + (p.max_skew - p.min_skew) * Rng(key(kMoeSkew, layer)).uniform();
    const double early = std::exp(-static_cast<double>(step) / static_cast<double>(p.settle_steps));
    const std::vector<double> by_place =
        zipf(static_cast<int>(experts_), settled * (1 + p.early_skew * early));
    const double position = settling_position(step, p.settle_steps, p.drift_steps);
    std::vector<double> share(experts_);
    for (std::size_t e = 0; e < experts_; ++e) {
      share[e] = by_place[orders_[static_cast<std::size_t>(layer)][e]] *
                 std::exp(p.drift * drift(key(kMoeDrift, layer, e), position));
    }
    const double sum = std::accumulate(share.begin(), share.end(), 0.0);
    for (double& s : share) s /= sum;
    return share;
  }

  // Draws the counts of one micro-batch of every device, by the normal approximation of the
  // multinomial distribution. Its covariance n (diag(p) - p p^T) is exact. No expert gets a token
  // twice, so counts are at most the tokens.
  std::vector<double> draw_counts(const std::vector<double>& share, Rng& rng) const {
    std::vector<double> deviation(experts_);
    for (std::size_t e = 0; e < experts_; ++e) {
      deviation[e] = std::sqrt(assignments_ * share[e]) * rng.normal();
    }
    const double excess = std::accumulate(deviation.begin(), deviation.end(), 0.0);
    std::vector<double> counts(experts_);
    for (std::size_t e = 0; e < experts_; ++e) {
      const double count = share[e] * (assignments_ - excess) + deviation[e];
      counts[e] = std::clamp(count, 0.0, tokens_);
    }
    return counts;
  }

  // Computes phi from recorded counts. If the recording has another number of blocks, the block at
  // the same relative depth is used. All micro-batches of a step count as one. Experts behind exits
  // work on the tokens that arrive.
  Phi recorded_phi(int layer, std::int64_t step) const {
    const auto& blocks = recorded_->at(step);
    const std::size_t block = block_of_[static_cast<std::size_t>(layer)] * blocks.size() / blocks_;
    const auto sum_of = [](const std::vector<double>& counts) {
      return std::accumulate(counts.begin(), counts.end(), 0.0);
    };
    const double sum = sum_of(blocks[block]);
    double all = 0;
    for (const std::vector<double>& counts : blocks) all = std::max(all, sum_of(counts));
    const double here = all > 0 ? sum / all : 1;
    const double capacity =
        options_.capacity_factor > 0
            ? std::ceil(options_.capacity_factor * sum / static_cast<double>(experts_))
            : sum;
    const double factor = straggler_factor(blocks[block], options_.expert_ranks, capacity);
    return {.mean = here * factor, .largest = here * factor};
  }

  Phi phi(int layer, std::int64_t step) const {
    if (recorded_) return recorded_phi(layer, step);
    const std::vector<double> share = popularity(layer, step);
    const double capacity =
        options_.capacity_factor > 0
            ? std::ceil(options_.capacity_factor * assignments_ / static_cast<double>(experts_))
            : assignments_;
    Rng rng(key(kMoeCounts, layer, static_cast<std::uint64_t>(step)));
    Phi result = {.mean = 0, .largest = 0};
    for (int i = 0; i < options_.sampled_micro_batches; ++i) {
      const double one = straggler_factor(draw_counts(share, rng), options_.expert_ranks, capacity);
      result.mean += one / options_.sampled_micro_batches;
      result.largest = std::max(result.largest, one);
    }
    return result;
  }

  cost::LayerCost cost_of(int layer, const Phi& phi) const {
    cost::LayerWork work = dense_.work[static_cast<std::size_t>(layer)];
    const auto& shape = dense_.shape;
    const auto tokens = static_cast<double>(shape.tokens());
    const double router = static_cast<double>(shape.hidden * shape.experts);  // weights
    const double stream = tokens * static_cast<double>(shape.hidden) *
                          dense_.device.bytes_per_element;  // the layer's input
    const auto scale = [](double& amount, double kept, double factor) {
      amount = kept + (amount - kept) * factor;
    };
    scale(work.matrix_flops, 2 * tokens * router, phi.mean);
    scale(work.moved_bytes, 5 * stream, phi.mean);          // norm and residual
    scale(work.activation_bytes, 2 * stream, phi.largest);  // inputs of norm and router
    scale(work.parameters, router, 1.0 / options_.expert_ranks);
    scale(work.product_parameters, router, 1.0 / options_.expert_ranks);
    return dense_.cost_of(work);
  }

  MoeOptions options_;
  std::optional<RecordedCounts> recorded_;
  DenseModel dense_;
  std::uint64_t seed_;
  std::size_t experts_;
  double tokens_ = 0;       // of the micro-batches of all expert ranks
  double assignments_ = 0;  // of these tokens
  std::vector<std::vector<std::size_t>> orders_;
  std::vector<std::size_t> block_of_;  // by layer: blocks with experts before it
  std::size_t blocks_ = 0;             // with experts
};

}  // namespace

double straggler_factor(std::span<const double> expert_load, int expert_ranks, double capacity) {
  const auto ranks = static_cast<std::size_t>(expert_ranks);
  DYNMO_CHECK(expert_ranks >= 1 && expert_load.size() % ranks == 0,
              "ranks that divide {} experts, got {}", expert_load.size(), expert_ranks);
  const double sum = std::accumulate(expert_load.begin(), expert_load.end(), 0.0);
  if (sum <= 0) return 1;  // no device waits
  const std::size_t each = expert_load.size() / ranks;
  double most = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    double load = 0;
    for (const double expert : expert_load.subspan(r * each, each)) {
      load += std::min(expert, capacity);
    }
    most = std::max(most, load);
  }
  return static_cast<double>(expert_ranks) * most / sum;
}

std::vector<double> zipf(int experts, double skew) {
  DYNMO_CHECK(experts >= 1, "at least 1 expert, got {}", experts);
  std::vector<double> share(static_cast<std::size_t>(experts));
  for (std::size_t i = 0; i < share.size(); ++i) {
    share[i] = std::pow(static_cast<double>(i + 1), -skew);
  }
  const double sum = std::accumulate(share.begin(), share.end(), 0.0);
  for (double& s : share) s /= sum;
  return share;
}

Expected<std::unique_ptr<LoadModel>> make_moe(const MoeOptions& options, const LoadInputs& inputs) {
  DYNMO_TRY(check(options));
  DYNMO_TRY(check_shape(options, inputs.shape));
  std::optional<RecordedCounts> recorded;
  if (!options.counts.empty()) {
    DYNMO_ASSIGN(recorded, read_counts(options.counts));
    if (recorded->experts != inputs.shape.experts) {
      return make_error(ErrorCode::kBadInput,
                        "moe.counts: '{}' has {} experts in a block, the model {}: wanted "
                        "model.experts = {}",
                        options.counts, recorded->experts, inputs.shape.experts, recorded->experts);
    }
  }
  DYNMO_ASSIGN(DenseModel dense, make_dense("moe", inputs));
  return std::unique_ptr<LoadModel>(
      std::make_unique<Moe>(options, std::move(recorded), std::move(dense), inputs.seed));
}

SourceEntry moe_source() { return source_entry<MoeOptions, make_moe>("moe"); }

}  // namespace dynmo::dynamism
