// SPDX-License-Identifier: Apache-2.0
#pragma once

// The bytes of a rank's stages at every point of its list, as a function of the recomputed layers.
// Also the set of least time that fits a limit. Times are in any unit.

#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan::internal {

// The memory of a rank's stages at one point of its list, in stashes of a micro-batch.
struct Point {
  std::vector<int> held;      // by stage of the rank: from F to the end of W
  std::vector<int> restored;  // from I to the end of W
  // The stage in a fused B, which restores layer by layer from the last one on, and frees each.
  int backward = -1;
  auto operator<=>(const Point&) const = default;

  [[nodiscard]] bool covers(const Point& other) const;
};

struct Item {
  LayerId layer;
  std::size_t stage = 0;  // of the rank
  std::int64_t activation = 0;
  std::int64_t kept = 0;  // if recomputed
  double seconds = 0;     // added by recomputation
  [[nodiscard]] std::int64_t saved() const { return activation - kept; }
  [[nodiscard]] bool same_choice(const Item& other) const {
    return stage == other.stage && activation == other.activation && kept == other.kept &&
           seconds == other.seconds;
  }
};

// Memory of one rank as a function of the set of its recomputed layers.
struct RankMemory {
  std::int64_t state = 0;
  std::size_t stages = 0;
  std::vector<Item> items;  // trained layers
  std::vector<Point> points;

  [[nodiscard]] std::int64_t at(const Point& point, const std::vector<bool>& chosen) const;
  [[nodiscard]] std::int64_t peak(const std::vector<bool>& chosen) const;
  // Returns the choice with the least memory: every layer that saves anything.
  [[nodiscard]] std::vector<bool> all() const;
};

// Returns the points of a list that no other one covers. `local` is the index on the rank by stage.
// `frozen` is by stage.
[[nodiscard]] std::vector<Point> points_of(const std::vector<schedule::Action>& list,
                                           const std::vector<int>& local,
                                           const std::vector<bool>& frozen, std::size_t stages);

// Returns the bytes of a layer's input, which a recomputed layer keeps. The first layer's input,
// the tokens, counts 0: the batch keeps it.
[[nodiscard]] Bytes input_bytes(const cost::ModelCost& model, std::size_t layer);

// Returns the memory of each rank. Returns kBadInput as schedule_of().
[[nodiscard]] Expected<std::vector<RankMemory>> memory_of(const Plan& plan,
                                                          const cost::ModelCost& model,
                                                          int micro_batches);

// Maximum number of sets that least_time_set() tries.
inline constexpr int kMaxSets = 10'000;
// Returns the set with the least sum of seconds among those that fit `limit`, by branch and bound.
// After `max_sets` sets it returns the best so far. This is a number and not a time, so that all
// ranks stop at the same set. Requires that recomputing all layers fits. (One more recomputed layer
// never needs more memory.)
[[nodiscard]] std::vector<bool> least_time_set(const RankMemory& rank, std::int64_t limit,
                                               int max_sets = kMaxSets);

}  // namespace dynmo::plan::internal
