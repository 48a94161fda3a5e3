// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/sparse_attention/load.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/dynamism/dense_impl.h"
#include "dynmo/dynamism/drift_impl.h"
#include "dynmo/dynamism/source_entry.h"

namespace dynmo::dynamism {
namespace {

enum AttentionDraw : std::uint64_t {
  kAttentionSkew = 0x5350415253,
  kAttentionDrift,
  kAttentionMicroBatch
};  // keys of this model

class SparseAttention final : public LoadModel {
 public:
  SparseAttention(const SparseAttentionOptions& options, DenseModel dense, std::uint64_t seed)
      : options_(options), dense_(std::move(dense)), fused_(fused(dense_)), seed_(seed) {}

  cost::ModelCost at(std::int64_t step) const override {
    cost::ModelCost model = dense_.costs;
    for (int layer = 0; layer < dense_.size(); ++layer) {
      if (dense_.kind(layer) != cost::LayerKind::kAttention) continue;
      model.layers[static_cast<std::size_t>(layer)] = cost_of(layer, share(layer, step));
    }
    return model;
  }

  bool counts_work() const override { return true; }

 private:
  std::uint64_t key(AttentionDraw draw, int layer, std::int64_t step = 0) const {
    return mix_key(
        {draw, seed_, static_cast<std::uint64_t>(layer), static_cast<std::uint64_t>(step)});
  }

  // Returns the work without stored scores: the sparse kernel never holds those of all pairs.
  static std::vector<cost::LayerWork> fused(const DenseModel& dense) {
    cost::TransformerShape shape = dense.shape;
    shape.fused_attention = true;
    return cost::transformer_work(shape, dense.device.bytes_per_element);
  }

  // Returns the share left of the core, mean over the step's micro-batches.
  double share(int layer, std::int64_t step) const {
    const SparseAttentionOptions& p = options_;
    if (p.rule == SparseRule::kDrop) {
      return core_share_without(p.dropped, p.block, dense_.shape.sequence);
    }
    const double own =
        p.min_skew + (p.max_skew - p.min_skew) * Rng(key(kAttentionSkew, layer)).uniform();
    const double position = static_cast<double>(step) / static_cast<double>(p.drift_steps);
    const double now = own + p.drift * drift(key(kAttentionDrift, layer), position);
    Rng rng(key(kAttentionMicroBatch, layer, step));
    double sum = 0;
    for (int i = 0; i < p.sampled_micro_batches; ++i) {
      const double skew = std::clamp(now + p.micro_batch_noise * rng.normal(), 0.0, 1.0);
      sum += core_share(std::pow(p.buckets, skew), p.buckets, p.block, dense_.shape.sequence);
    }
    return sum / p.sampled_micro_batches;
  }

  cost::LayerCost cost_of(int layer, double share) const {
    constexpr double kIndex = 2;  // bytes
    const auto& shape = dense_.shape;
    const double element = dense_.device.bytes_per_element;
    const auto tokens = static_cast<double>(shape.tokens());
    const auto queries = static_cast<double>(shape.heads * shape.head_size);
    const auto keys = static_cast<double>(shape.kv_heads * shape.head_size);
    const double permuted = tokens * (queries + 2 * keys) * element;
    const double indices = 4 * static_cast<double>(shape.heads) * tokens * kIndex;
    cost::LayerWork work = fused_[static_cast<std::size_t>(layer)];
    work.core_flops *= share;
    // Each copy is read and written: queries, keys and values in, outputs back.
    work.moved_bytes += 2 * (permuted + tokens * queries * element) + indices;
    work.activation_bytes += permuted + indices;
    return dense_.cost_of(work);
  }

  SparseAttentionOptions options_;
  DenseModel dense_;
  std::vector<cost::LayerWork> fused_;
  std::uint64_t seed_;
};

}  // namespace

double core_share(double kappa, int buckets, double block, std::int64_t sequence) {
  DYNMO_CHECK(buckets >= 1 && sequence >= 1 && kappa >= 1 - 1e-9,
              "buckets, tokens and a skew of at least 1, got {}, {}, {}", buckets, sequence, kappa);
  const double overlap = 1 + block * buckets / static_cast<double>(sequence);
  return std::min(kappa / buckets * overlap, 1.0);
}

double core_share_without(double dropped, double block, std::int64_t sequence) {
  DYNMO_CHECK(dropped >= 0 && dropped < 1 && sequence >= 1,
              "a share below 1 of some tokens, got {} of {}", dropped, sequence);
  const double overlap = 1 + block / ((1 - dropped) * static_cast<double>(sequence));
  return dropped > 0 ? std::min((1 - dropped) * (1 - dropped) * overlap, 1.0) : 1.0;
}

Expected<std::unique_ptr<LoadModel>> make_sparse_attention(const SparseAttentionOptions& options,
                                                           const LoadInputs& inputs) {
  DYNMO_TRY(check(options));
  DYNMO_ASSIGN(DenseModel dense, make_dense("sparse_attention", inputs));
  return std::unique_ptr<LoadModel>(
      std::make_unique<SparseAttention>(options, std::move(dense), inputs.seed));
}

SourceEntry sparse_attention_source() {
  return source_entry<SparseAttentionOptions, make_sparse_attention>("sparse_attention");
}

}  // namespace dynmo::dynamism
