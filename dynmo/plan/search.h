// SPDX-License-Identifier: Apache-2.0
#pragma once

// Searches cut, placement, schedule and order together. Candidates are scored by the replay of the
// lowered schedule. They are every template with every balancer's cut, the current plan, and plans
// of the `adaptive` schedule. The cut and order of those are annealed over several placements
// (docs/planner.md). Deterministic: the effort is a number of evaluations, not a time, and all
// decisions use integers. So all ranks find the same plan.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan {

// Returns an error for a plan that cannot be taken, whatever its step time.
using PlanFilter = std::function<Expected<void>(const Plan&)>;

struct SearchProblem : Costs {
  const Plan* current = nullptr;  // the plan in force, a candidate; nullptr: none
};

inline constexpr std::int64_t kMaxEvaluations = std::int64_t{1} << 40;

struct SearchOptions {
  // Effort of the annealing. One evaluation is 1,536 actions placed by the list scheduler. That is
  // one run over 8 ranks of two stages and 32 micro-batches. So the time is about proportional to
  // this number for any size of the problem. The default takes about a second of one core.
  std::int64_t evaluations = 6500;
  std::uint64_t seed = 0;
  // Only candidates of this schedule. nullopt ("auto") means the best of all. The current plan is a
  // candidate if it has this schedule.
  std::optional<schedule::ScheduleKind> schedule = std::nullopt;
  // With kAuto, annealing runs a second time with recomputed layers if a template needs
  // recomputation.
  Recompute recompute = Recompute::kNone;
  const PlanFilter* accepts = nullptr;  // none: every plan
  bool replays_cuts = false;            // a candidate of each template is the best cut by replay
};

struct SearchCandidate {
  std::string name;  // "1f1b/optimal", "adaptive/wave-6", "current"
  double step_time_s = 0;
  bool fits = false;  // within every rank's memory
};

struct SearchResult {
  Plan plan;  // generation 0, or the unchanged current plan
  Evaluation evaluation;
  LayerSet recomputed;                      // recomputed_layers() of it
  std::string winner;                       // name of the candidate of `plan`
  std::vector<SearchCandidate> candidates;  // all that could be replayed, in the order of trial
  std::int64_t evaluations = 0;             // spent, in the unit of SearchOptions
};

// Returns the plan with the least replayed step time of all candidates that fit the memory of every
// rank. Ties go to the current plan, then to the candidate tried first. So it is never slower than
// any template with any balancer's cut, nor than the current plan, if those fit. A rank may stay
// idle, also if there are more ranks than layers.
//
// Returns kBadInput as evaluate(), for evaluations below 0, or a current plan of other layers or
// ranks. Also returns it for a schedule that no cut of these layers, ranks and micro-batches can
// run. Returns kInfeasible if no candidate fits, with the rank and missing bytes of the nearest
// one. Returns the filter's own error if it accepts no candidate.
[[nodiscard]] Expected<SearchResult> search(const SearchProblem& problem,
                                            const SearchOptions& options = {});

}  // namespace dynmo::plan
