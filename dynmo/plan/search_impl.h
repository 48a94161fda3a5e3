// SPDX-License-Identifier: Apache-2.0
#pragma once

// The candidates of search() that need no search.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/search.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan::internal {

struct Template {
  std::string name;  // "1f1b/optimal"
  Plan plan;
  bool plain = false;  // cut without recomputation
};

// Every schedule that follows from a shape alone, with every balancer's cuts, in a fixed order. If
// a balancer finds no cut (more ranks than layers, memory), its error is in `refusals`.
struct Templates {
  std::vector<Template> made;
  std::vector<Error> refusals;
};
[[nodiscard]] Templates templates(const SearchProblem& problem, const SearchOptions& options);

// A search for the best cut by replay, for any placement whose order follows from a schedule kind.
// The balancers level work, and a step is more than its slowest rank.
struct ReplayedCutProblem : Costs {
  schedule::ScheduleKind kind = schedule::ScheduleKind::k1F1B;
  const std::vector<Rank>& placement;  // by stage
  std::int64_t max_actions = 0;        // replayed at most
};

// Returns the layers of each stage, or nullopt if no replayed cut fits the memory. If there are few
// cuts, it replays all whose lower bound is below the best time, so the result is the best.
// Otherwise it moves one layer at a time from one stage to another, from the best start on. It does
// so while the replay becomes shorter. Both end after `max_actions`, not at a time. Errors are
// those of `evaluate`.
[[nodiscard]] Expected<std::optional<std::vector<int>>> replayed_cut(
    const ReplayedCutProblem& problem, std::span<const std::vector<int>> starts);

}  // namespace dynmo::plan::internal
