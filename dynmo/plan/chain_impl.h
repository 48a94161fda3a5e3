// SPDX-License-Identifier: Apache-2.0
#pragma once

// The balancers' problem in integers: cut a chain of layers into one non-empty range a rank, in
// order, so that the slowest rank is as fast as possible and no rank's memory overflows.
//
// Why integers: sums of doubles depend on the order of adding and on the unit of time, so ties
// would be broken by rounding. Layer work is therefore counted in parts of the heaviest layer, and
// slowness in parts of the fastest rank. Both numbers of parts are least common multiples, so that
// costs and speeds in small whole ratios (equal blocks, a head of four blocks, a rank of 3/4 the
// speed) are exact and true ties are seen as ties.

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
  std::int64_t tie_slowness = 1;  // the same, coarser, so that squares fit 128 bits
  std::int64_t memory_bytes = 0;  // limit
  std::int64_t in_flight = 1;     // stashes held at once
};

struct Chain {
  std::vector<std::int64_t> work;        // prefix sums, layers + 1 of them
  std::vector<std::int64_t> state;       // prefix sums of bytes
  std::vector<std::int64_t> activation;  // prefix sums of bytes of one micro-batch
  std::vector<ChainRank> ranks;
  // Recomputation of each rank, as far as a range's memory asks for it; empty: none is done.
  std::vector<std::shared_ptr<RangeRecompute>> recompute = {};
  // v-pair's: a rank recomputes parts of layers at one price, until these bytes (prefix sums as
  // `activation`) are left of its stashes. Empty: none is done.
  std::vector<std::int64_t> kept = {};
  std::int64_t added_parts = 0;  // all layers recomputed

  [[nodiscard]] int layers() const { return static_cast<int>(work.size()) - 1; }
  [[nodiscard]] int size() const { return static_cast<int>(ranks.size()); }
  // Work of everything, recomputation included: no rank has more.
  [[nodiscard]] std::int64_t most_work() const { return work.back() + added_parts; }
  // Least bytes that rank `rank` holds with layers [first, end).
  [[nodiscard]] std::int64_t need(int rank, int first, int end) const {
    const auto i = static_cast<std::size_t>(first);
    const auto j = static_cast<std::size_t>(end);
    if (!recompute.empty()) return recompute[static_cast<std::size_t>(rank)]->min_bytes(first, end);
    return state[j] - state[i] +
           ranks[static_cast<std::size_t>(rank)].in_flight * (activation[j] - activation[i]);
  }
  // Whether the rank's memory holds the layers and their work, recomputation included, is within
  // `limit`.
  [[nodiscard]] bool fits(int rank, int first, int end, std::int64_t limit) const {
    const auto r = static_cast<std::size_t>(rank);
    const std::int64_t own =
        work[static_cast<std::size_t>(end)] - work[static_cast<std::size_t>(first)];
    if (own > limit || need(rank, first, end) > ranks[r].memory_bytes) return false;
    return recompute.empty() || limit >= most_work() ||
           recompute[r]->within(first, end, limit - own);
  }
  // Seconds that the rank recomputes of a range; nullopt if it does not fit.
  [[nodiscard]] std::optional<double> added_s(int rank, int first, int end) const {
    const auto r = static_cast<std::size_t>(rank);
    if (recompute.empty()) return 0;
    if (need(rank, first, end) > ranks[r].memory_bytes) return std::nullopt;
    return recompute[r]->seconds(first, end);
  }
  // Work of a range that fits, recomputation included.
  [[nodiscard]] std::int64_t work_of(int rank, int first, int end) const {
    const std::int64_t own =
        work[static_cast<std::size_t>(end)] - work[static_cast<std::size_t>(first)];
    if (recompute.empty()) return own;
    return own + recompute[static_cast<std::size_t>(rank)]->parts(first, end);
  }
};

// `weights` (finite, not negative; all zero: layers count alike) as prefix sums of whole parts.
[[nodiscard]] std::vector<std::int64_t> quantized_prefix_sums(std::span<const double> weights);
// Other amounts of the same layers in the same parts.
[[nodiscard]] std::vector<std::int64_t> in_parts_of(std::span<const double> weights,
                                                    std::span<const double> amounts);

// Sets slowness and tie_slowness from speeds (finite, above 0).
void set_speeds(Chain& chain, std::span<const double> speeds);

// The work that each rank may have while none needs longer than `bottleneck`.
[[nodiscard]] std::vector<std::int64_t> work_limits(const Chain& chain, Wide bottleneck);

// Everything on the slowest rank; and the least time in which the ranks' limits add up to all work,
// were layers divisible.
[[nodiscard]] Wide slowest_time(const Chain& chain);
[[nodiscard]] Wide ideal_time(const Chain& chain);

// Smallest bottleneck in [low, high] for which `works`, which is monotone and holds at `high`.
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

// Counts a rank of the best cut under the rule of balance.h; nullopt if no cut fits the memory.
// Requires 1 <= size() <= layers().
[[nodiscard]] std::optional<std::vector<int>> best_cut(const Chain& chain);

// The tie rule: of the cuts that keep `bottleneck` the one with the least sum of squared times, the
// leftmost of those; nullopt if none keeps it. kNarrow leaves out starts that a lower bound
// excludes (same cut, less time); kAll is there to test that.
enum class Windows { kAll, kNarrow };
[[nodiscard]] std::optional<std::vector<int>> most_even_cut(const Chain& chain, Wide bottleneck,
                                                            Windows use);

// Returns the memory that would let a chain fit that fits no cut: the least memory of a single
// rank, the others as they are (`rank`; ties to the lowest), or, where no single rank is enough,
// the least bytes added to every rank (rank -1).
struct MemoryAdvice {
  int rank = -1;
  std::int64_t bytes = 0;
};
[[nodiscard]] MemoryAdvice advise(const Chain& chain);

}  // namespace dynmo::plan::internal
