// SPDX-License-Identifier: Apache-2.0
#pragma once

// One step of a pipeline under the plan before a move and under the plan after it, as a
// chart is drawn from it (html_page.h).

#include <cstdint>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"

namespace dynmo::observe {

struct Move {
  std::int64_t step = 0;  // the first one under the plan `after`
  plan::Plan before;
  plan::Plan after;
};

// Ranks that a chart shows: the first and the last ones of more.
inline constexpr int kMaxSpanRanks = 32;
// Actions that a chart shows of a plan: of more, those that begin first.
inline constexpr int kMaxSpans = 3200;

// Replays both plans with the same costs. For each rank of both {plan, rank, actions, start_s,
// end_s}: `plan` is a text that says which of the two it is and how long its step takes, and the
// lists have an element for each action. kBadInput: a plan cannot be replayed with these costs and
// micro-batches.
[[nodiscard]] Expected<Json> tracks_of(const Move& move, const cost::ModelCost& costs,
                                       const cost::Cluster& cluster, int micro_batches);

}  // namespace dynmo::observe
