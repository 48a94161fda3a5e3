// SPDX-License-Identifier: Apache-2.0
#pragma once

// The work that recomputation adds to a range of layers on a rank: the inner function of the
// balancers that cut under memory. The least set of a range depends on the range and on the stashes
// in flight alone, and a longer range needs no less work, memory or recomputation. So the ranges
// that a level of work allows are prefixes, and greedy filling stays exact.

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/plan/recompute_memory_impl.h"

namespace dynmo::plan::internal {

// One stage of a chain. Not thread-safe: it remembers what it was asked.
class RangeRecompute {
 public:
  // `forward`: parts of work of each layer, in the chain's unit; `points` of one stage, none that
  // another covers. Keeps a reference to `model`.
  RangeRecompute(Recompute choice, const cost::ModelCost& model, std::vector<std::int64_t> forward,
                 std::vector<Point> points, std::int64_t memory);

  // Least bytes that the layers [first, end) take: with all of them recomputed.
  [[nodiscard]] std::int64_t min_bytes(int first, int end) const;
  // Whether min_bytes fit the memory and at most `limit` parts are added. Answered from bounds
  // where they are enough.
  [[nodiscard]] bool within(int first, int end, std::int64_t limit);
  // Parts that a set adds which fits; the least, or at most one layer's above it. Requires that
  // min_bytes fit.
  [[nodiscard]] std::int64_t parts(int first, int end);
  // Seconds of the least set (a fixed number of steps, as least_time_set). Requires the same.
  [[nodiscard]] double seconds(int first, int end);
  // Parts of all layers of the model.
  [[nodiscard]] std::int64_t all_parts() const { return all_parts_; }
  [[nodiscard]] std::int64_t memory() const { return memory_; }

 private:
  struct Range {
    std::int64_t lower = 0;  // of the least parts
    std::int64_t upper = 0;
    double seconds = -1;  // of the least set; below 0: not known
  };
  [[nodiscard]] Range& range(int first, int end);
  [[nodiscard]] Range bounds(int first, int end) const;
  void solve(Range& range, int first, int end) const;
  [[nodiscard]] RankMemory memory_of_range(int first, int end) const;
  [[nodiscard]] std::int64_t sum(const std::vector<std::int64_t>& sums, int first, int end) const {
    return sums[static_cast<std::size_t>(end)] - sums[static_cast<std::size_t>(first)];
  }

  Recompute choice_;
  const cost::ModelCost& model_;
  int frozen_;
  std::vector<std::int64_t> forward_;  // by layer
  std::vector<Point> points_;
  std::int64_t memory_;
  std::int64_t all_parts_ = 0;
  std::vector<std::int64_t> state_;       // prefix sums
  std::vector<std::int64_t> activation_;  // of trained layers
  std::vector<std::int64_t> saved_;       // of those that save anything
  std::vector<std::int64_t> added_;       // parts of the set of kWhole
  std::vector<double> added_s_;
  std::unordered_map<std::int64_t, Range> ranges_;
};

}  // namespace dynmo::plan::internal
