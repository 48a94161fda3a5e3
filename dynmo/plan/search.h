// SPDX-License-Identifier: Apache-2.0
#pragma once

// Cut, placement, schedule and order together, scored by the replay of the lowered schedule: every
// template with every balancer's cut, the current plan, and plans of the `adaptive` schedule whose
// cut and order are annealed over a portfolio of placements (docs/planner.md). Deterministic: the
// effort is a number of evaluations, not a time, and every decision is of integers, so all ranks
// find the same plan.

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

struct SearchProblem {
  const cost::ModelCost& model;
  const cost::Cluster& cluster;
  int micro_batches = 1;
  const Plan* current = nullptr;  // the plan in force, a candidate; nullptr: none
};

struct SearchOptions {
  // Effort of the annealing. One evaluation is 1,536 actions placed by the list scheduler: one run
  // over 8 ranks of two stages and 32 micro-batches. So the time is about proportional to this
  // number whatever the size of the problem, the default being about a second of one core.
  std::int64_t evaluations = 6500;
  std::uint64_t seed = 0;
  // Only candidates of this schedule; nullopt ("auto"): the best of all. The current plan is a
  // candidate if its schedule is this one.
  std::optional<schedule::ScheduleKind> schedule = std::nullopt;
  // kAuto anneals a second time, with layers recomputed, where a template asks for recomputation.
  Recompute recompute = Recompute::kNone;
  const PlanFilter* accepts = nullptr;  // none: every plan
};

struct SearchCandidate {
  std::string name;  // "1f1b/optimal", "adaptive/wave-6", "current"
  double step_time_s = 0;
  bool fits = false;  // within every rank's memory
};

struct SearchResult {
  Plan plan;  // generation 0, or the current plan as it is
  Evaluation evaluation;
  LayerSet recomputed;                      // recomputed_layers() of it
  std::string winner;                       // name of the candidate that is `plan`
  std::vector<SearchCandidate> candidates;  // all that could be replayed, in the order of trial
  std::int64_t evaluations = 0;             // spent, in the unit of SearchOptions
};

// The plan with the least replayed step time of all candidates that fit the memory of every rank;
// ties go to the current plan, then to the candidate tried first. So it is never slower than any
// template with any balancer's cut, nor than the current plan, if those fit. A rank may be left
// idle, also where there are more ranks than layers.
//
// kBadInput as `evaluate` says, for evaluations below 0, a current plan of other layers or ranks,
// or a schedule that no cut of these layers, ranks and micro-batches can run. kInfeasible: no
// candidate fits; says which rank of the nearest one wants how much more. The filter's own error:
// it takes no candidate.
[[nodiscard]] Expected<SearchResult> search(const SearchProblem& problem,
                                            const SearchOptions& options = {});

}  // namespace dynmo::plan
