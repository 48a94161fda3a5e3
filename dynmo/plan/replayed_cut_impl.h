// SPDX-License-Identifier: Apache-2.0
#pragma once

// The best cut by replay, for any placement whose order follows from a schedule kind. The
// balancers level work, and a step is more than its slowest rank.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan::internal {

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
