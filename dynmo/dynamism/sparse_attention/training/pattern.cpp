// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/sparse_attention/training/pattern.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/kernels/angular_hashes.h"
#include "dynmo/kernels/generic_selection.h"
#include "dynmo/kernels/host_memory.h"

namespace dynmo::dynamism {
namespace {

enum PatternDraw : std::uint64_t { kDirections = 0x48415348, kQueryDrops, kKeyDrops };

std::uint64_t pattern_key(PatternDraw draw, const model::LayerState& state,
                          const model::LayerContext& context) {
  if (context.pass != model::Pass::kTraining) {
    return mix_key({draw, static_cast<std::uint64_t>(state.id.value)});
  }
  return mix_key({draw, state.random_key, static_cast<std::uint64_t>(context.step),
                  static_cast<std::uint64_t>(context.micro_batch.value)});
}

at::Tensor index_tensor(std::span<const std::int64_t> numbers) {
  at::Tensor tensor = at::empty({std::ssize(numbers)}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), kernels::host_data<std::int64_t>(tensor));
  return tensor;
}

class HashPattern final : public model::AttentionPattern {
 public:
  explicit HashPattern(int buckets) : buckets_(buckets) {}

  bool shares_keys() const override { return true; }

  kernels::Selection select(const at::Tensor& q_BTHK, const model::LayerState& state,
                            const model::LayerContext& context) const override {
    const std::int64_t sequences = q_BTHK.size(0);
    const std::int64_t tokens = q_BTHK.size(1);
    const std::int64_t heads = q_BTHK.size(2);
    at::Tensor bucket_BHT = at::zeros({sequences, heads, tokens}, q_BTHK.options().dtype(at::kInt));
    if (buckets_ > 1) {
      bucket_BHT = kernels::angular_hashes(
          q_BTHK, directions(pattern_key(kDirections, state, context), q_BTHK));
    }
    if (!q_BTHK.is_cpu()) {
      return kernels::generic::can_pack(q_BTHK, buckets_)
                 ? kernels::generic::pack_buckets(bucket_BHT, buckets_)
                 : kernels::generic::select_buckets(bucket_BHT, buckets_);
    }
    // A counting sort for each head: by bucket, then by time.
    std::vector<std::int64_t> rows(static_cast<std::size_t>(bucket_BHT.numel()));
    std::vector<std::int64_t> offsets;
    std::int64_t filled = 0;
    const auto* bucket = kernels::host_data<const std::int32_t>(bucket_BHT);
    for (std::int64_t b = 0; b < sequences; ++b) {
      for (std::int64_t h = 0; h < heads; ++h, bucket += tokens) {
        std::vector<std::int64_t> next(static_cast<std::size_t>(buckets_));
        for (std::int64_t t = 0; t < tokens; ++t) ++next[static_cast<std::size_t>(bucket[t])];
        for (std::int64_t& place : next) {
          offsets.push_back(filled);
          filled += std::exchange(place, filled);
        }
        for (std::int64_t t = 0; t < tokens; ++t) {
          const std::int64_t place = next[static_cast<std::size_t>(bucket[t])]++;
          rows[static_cast<std::size_t>(place)] = (b * tokens + t) * heads + h;
        }
      }
    }
    offsets.push_back(filled);
    kernels::Selection selection{.queries = index_tensor(rows),
                                 .query_offsets = index_tensor(offsets),
                                 .keys = {},
                                 .key_offsets = {},
                                 .mask = kernels::Mask::kStrict};
    selection.keys = selection.queries;
    selection.key_offsets = selection.query_offsets;
    return selection;
  }

 private:
  // Returns unit columns for each head, HKS, on q's device. The device reads them from pinned
  // memory, so the host does not wait.
  at::Tensor directions(std::uint64_t key, const at::Tensor& q_BTHK) const {
    const std::int64_t heads = q_BTHK.size(2);
    const std::int64_t size = q_BTHK.size(3);
    const std::int64_t count = buckets_ / 2;
    at::Tensor all =
        at::empty({heads, size, count}, at::dtype(at::kDouble).pinned_memory(!q_BTHK.is_cpu()));
    auto* element = kernels::host_data<double>(all);
    for (std::int64_t h = 0; h < heads; ++h, element += size * count) {
      Rng rng(mix_key({key, static_cast<std::uint64_t>(h)}));
      for (std::int64_t s = 0; s < count; ++s) {
        double squares = 0;
        for (std::int64_t k = 0; k < size; ++k) {
          const double drawn = rng.normal();
          element[k * count + s] = drawn;
          squares += drawn * drawn;
        }
        for (std::int64_t k = 0; k < size; ++k) element[k * count + s] /= std::sqrt(squares);
      }
    }
    return all.to(q_BTHK.device(), /*non_blocking=*/true);
  }

  std::int64_t buckets_;
};

class DropPattern final : public model::AttentionPattern {
 public:
  explicit DropPattern(double dropped) : dropped_(dropped) {}

  bool shares_keys() const override { return false; }

  kernels::Selection select(const at::Tensor& q_BTHK, const model::LayerState& state,
                            const model::LayerContext& context) const override {
    kernels::Selection selection;
    kept(q_BTHK, pattern_key(kQueryDrops, state, context), selection.queries,
         selection.query_offsets);
    kept(q_BTHK, pattern_key(kKeyDrops, state, context), selection.keys, selection.key_offsets);
    return selection;
  }

 private:
  // Adds the kept rows of each head. A head draws token by token, so a longer text begins with the
  // same draws.
  void kept(const at::Tensor& q_BTHK, std::uint64_t key, at::Tensor& rows,
            at::Tensor& offsets) const {
    const std::int64_t tokens = q_BTHK.size(1);
    const std::int64_t heads = q_BTHK.size(2);
    std::vector<std::int64_t> all;
    std::vector<std::int64_t> ends = {0};
    for (std::int64_t b = 0; b < q_BTHK.size(0); ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        Rng rng(mix_key({key, static_cast<std::uint64_t>(b), static_cast<std::uint64_t>(h)}));
        for (std::int64_t t = 0; t < tokens; ++t) {
          if (rng.uniform() >= dropped_) all.push_back((b * tokens + t) * heads + h);
        }
        ends.push_back(std::ssize(all));
      }
    }
    rows = index_tensor(all);
    offsets = index_tensor(ends);
  }

  double dropped_;
};

}  // namespace

std::shared_ptr<const model::AttentionPattern> make_pattern(const SparseAttentionOptions& options) {
  const auto valid = check(options);
  DYNMO_CHECK(valid.has_value(), "valid options: {}", valid.error().message);
  if (options.rule == SparseRule::kDrop) return std::make_shared<DropPattern>(options.dropped);
  return std::make_shared<HashPattern>(options.buckets);
}

}  // namespace dynmo::dynamism
