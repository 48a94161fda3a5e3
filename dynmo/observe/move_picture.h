// SPDX-License-Identifier: Apache-2.0
#pragma once

// One step of a pipeline under the plans before and after a move, as data of a chart (html_page.h).

#include <cstdint>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/plan.h"

namespace dynmo::observe {

struct Move {
  std::int64_t step = 0;  // the first step under the plan `after`
  plan::Plan before;
  plan::Plan after;
};

// Ranks that a chart shows. If there are more, these are the first and the last ones.
inline constexpr int kMaxSpanRanks = 32;
// Actions of a plan that a chart shows. If there are more, these are the first ones to begin.
inline constexpr int kMaxSpans = 3200;

// Replays both plans with the same costs. Returns {plan, rank, actions, start_s, end_s} for each
// rank of both. `plan` is a text with the plan's role and the time of its step. The lists have an
// element for each action. Returns kBadInput if a plan cannot be replayed with these costs and
// micro-batches.
[[nodiscard]] Expected<Json> tracks_of(const Move& move, const plan::Costs& costs);

}  // namespace dynmo::observe
