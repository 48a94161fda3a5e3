// SPDX-License-Identifier: Apache-2.0
#pragma once

// The balancers' problem in integers: cut a chain of layers into one non-empty range for each rank,
// in order. The slowest rank must be as fast as possible, and no rank's memory may overflow.
//
// Sums of doubles would depend on the order of adding and on the unit of time. Rounding would break
// ties. So layer work is counted in parts of the heaviest layer, and slowness in parts of the
// fastest rank. Both numbers of parts are least common multiples. So costs and speeds in small
// whole ratios are exact, and true ties are ties. (Examples are equal blocks, a head of four
// blocks, a rank of 3/4 the speed.)

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dynmo/plan/range_recompute_impl.h"

namespace dynmo::plan::internal {

__extension__ typedef unsigned __int128 Wide;

struct ChainRank {
  std::int64_t slowness = 1;      // time = work x slowness
  std::int64_t tie_slowness = 1;  // coarser slowness, so that squares fit 128 bits
  std::int64_t memory_bytes = 0;  // limit
  std::int64_t in_flight = 1;     // stashes held at once
};

struct Chain {
  std::vector<std::int64_t> work;        // prefix sums, layers + 1 of them
  std::vector<std::int64_t> state;       // prefix sums of bytes
  std::vector<std::int64_t> activation;  // prefix sums of bytes of one micro-batch
  std::vector<ChainRank> ranks;
  // Recomputation of each rank, if a range's memory needs it. Empty if none recomputes.
  std::vector<std::shared_ptr<RangeRecompute>> recompute = {};
  // For kVPair: prefix sums of the stash bytes that stay if all layers are recomputed. A rank may
  // recompute any part of its layers, at one price a byte. Empty if none may.
  std::vector<std::int64_t> kept = {};
  std::int64_t added_parts = 0;  // if all layers are recomputed

  [[nodiscard]] int layers() const { return static_cast<int>(work.size()) - 1; }
  [[nodiscard]] int size() const { return static_cast<int>(ranks.size()); }
  // Returns all work with recomputation, the upper bound of a rank.
  [[nodiscard]] std::int64_t most_work() const { return work.back() + added_parts; }
  // Returns the minimum bytes of rank `rank` with layers [first, end).
  [[nodiscard]] std::int64_t need(int rank, int first, int end) const {
    const auto i = static_cast<std::size_t>(first);
    const auto j = static_cast<std::size_t>(end);
    if (!recompute.empty()) return recompute[static_cast<std::size_t>(rank)]->min_bytes(first, end);
    return state[j] - state[i] +
           ranks[static_cast<std::size_t>(rank)].in_flight * (activation[j] - activation[i]);
  }
  // Returns whether the rank's memory holds the layers, and their work with recomputation is at
  // most `limit`.
  [[nodiscard]] bool fits(int rank, int first, int end, std::int64_t limit) const {
    const auto r = static_cast<std::size_t>(rank);
    const std::int64_t own =
        work[static_cast<std::size_t>(end)] - work[static_cast<std::size_t>(first)];
    if (own > limit || need(rank, first, end) > ranks[r].memory_bytes) return false;
    return recompute.empty() || limit >= most_work() ||
           recompute[r]->within(first, end, limit - own);
  }
  // Returns the seconds of recomputation of a range, or nullopt if it does not fit.
  [[nodiscard]] std::optional<double> added_s(int rank, int first, int end) const {
    const auto r = static_cast<std::size_t>(rank);
    if (recompute.empty()) return 0;
    if (need(rank, first, end) > ranks[r].memory_bytes) return std::nullopt;
    return recompute[r]->seconds(first, end);
  }
  // Returns the work of a range that fits, with recomputation.
  [[nodiscard]] std::int64_t work_of(int rank, int first, int end) const {
    const std::int64_t own =
        work[static_cast<std::size_t>(end)] - work[static_cast<std::size_t>(first)];
    if (recompute.empty()) return own;
    return own + recompute[static_cast<std::size_t>(rank)]->parts(first, end);
  }
};

// Returns prefix sums of `weights` in whole parts. Weights must be finite and not negative. If all
// are zero, layers have equal weights.
[[nodiscard]] std::vector<std::int64_t> quantized_prefix_sums(std::span<const double> weights);
// Returns the amounts in whole parts, by layer. A part is the unit of
// quantized_prefix_sums(weights).
[[nodiscard]] std::vector<std::int64_t> in_parts_of(std::span<const double> weights,
                                                    std::span<const double> amounts);

// Sets slowness and tie_slowness from speeds (finite, above 0).
void set_speeds(Chain& chain, std::span<const double> speeds);

// Returns the maximum work of each rank if none needs longer than `bottleneck`.
[[nodiscard]] std::vector<std::int64_t> work_limits(const Chain& chain, Wide bottleneck);

// Returns the time of all work on the slowest rank. The function ideal_time() treats layers as
// divisible. It returns the least time in which the ranks' limits add up to all work.
[[nodiscard]] Wide slowest_time(const Chain& chain);
[[nodiscard]] Wide ideal_time(const Chain& chain);

// Returns the smallest bottleneck in [low, high] for which `works` is true. `works` is monotone and
// true at `high`.
template <typename Works>
Wide smallest(Wide low, Wide high, Works works) {
  while (low < high) {
    const Wide middle = low + (high - low) / 2;
    if (works(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Returns the layers of each rank in the best cut by the rule of balance.h. Returns nullopt if no
// cut fits the memory. Requires 1 <= size() <= layers().
[[nodiscard]] std::optional<std::vector<int>> best_cut(const Chain& chain);

// The missing memory of a chain that fits no cut. It is the least memory of a single rank (`rank`,
// ties to the lowest) with the others unchanged. If no single rank suffices, it is the least bytes
// added to every rank (rank -1).
struct MemoryAdvice {
  int rank = -1;
  std::int64_t bytes = 0;
};
// Returns the missing memory.
[[nodiscard]] MemoryAdvice advise(const Chain& chain);

}  // namespace dynmo::plan::internal
