// SPDX-License-Identifier: Apache-2.0
#pragma once

// The work that recomputation adds to a range of layers on a rank. It is the inner function of
// balancers with limited memory. The least set of a range depends only on the range and on the
// stashes in flight. A longer range needs no less work, memory or recomputation. So the ranges
// within a limit of work are prefixes, and greedy filling is exact.

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/plan/recompute_memory_impl.h"

namespace dynmo::plan::internal {

// One stage of a chain. Not thread-safe: it caches results.
class RangeRecompute {
 public:
  // Begins with an empty cache. `forward` has the work of each layer in parts of the chain's unit.
  // `points` are those of one stage, none covered by another. Keeps a reference to `model`.
  RangeRecompute(Recompute choice, const cost::ModelCost& model, std::vector<std::int64_t> forward,
                 std::vector<Point> points, std::int64_t memory);

  // Returns the minimum bytes of the layers [first, end): with all of them recomputed.
  [[nodiscard]] std::int64_t min_bytes(int first, int end) const;
  // Returns whether min_bytes() fit the memory and at most `limit` parts are added. Uses bounds if
  // they decide it.
  [[nodiscard]] bool within(int first, int end, std::int64_t limit);
  // Returns the parts of the least set that fits, or at most one layer's parts more. Requires that
  // min_bytes() fit.
  [[nodiscard]] std::int64_t parts(int first, int end);
  // Returns the seconds of the least set (a fixed number of steps, as least_time_set()). Requires
  // that min_bytes() fit.
  [[nodiscard]] double seconds(int first, int end);
  // Returns the parts of all layers of the model.
  [[nodiscard]] std::int64_t all_parts() const { return all_parts_; }
  [[nodiscard]] std::int64_t memory() const { return memory_; }

 private:
  struct Range {
    std::int64_t lower = 0;  // of the least parts
    std::int64_t upper = 0;
    double seconds = -1;  // of the least set; below 0: not known
  };
  // Prefix sums over the layers.
  struct Sums {
    std::vector<std::int64_t> state = {0};
    std::vector<std::int64_t> activation = {0};  // of trained layers
    std::vector<std::int64_t> saved = {0};       // of layers that save anything
    std::vector<std::int64_t> added = {0};       // parts of the set of kWhole
    std::vector<double> added_s = {0};
  };
  // Returns the maximum bytes of the layers [first, end). `saved_of` has the bytes that
  // recomputation saves of each layer.
  template <typename SavedOf>
  [[nodiscard]] std::int64_t bytes_with(int first, int end, const SavedOf& saved_of) const;
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
  Sums sums_;
  std::unordered_map<std::int64_t, Range> ranges_;
};

}  // namespace dynmo::plan::internal
