// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cuts of a balancer that are worth a replay where layers may be recomputed: propose() and the
// templates of search() try the same.

#include <optional>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/plan/balance.h"

namespace dynmo::plan::internal {

// The assumption of a cut.
enum class CutFor {
  kPlain,  // nothing is recomputed
  kWhole,  // everything is
  kLeast,  // as little as fits: only balancers that know memory can
};
// A cut to try: for the memory of the cluster, or for less on the ladder (memory_ladder_impl.h),
// from its rung on downwards.
struct Trial {
  CutFor what = CutFor::kPlain;
  std::optional<int> rungs_below = {};
};
// In the order of trial: for kNone and kWhole one. A balancer that knows memory has trials on the
// ladder if no exact measure says which of its cuts is best, with several stages a rank: then more
// memory would now and then give a slower plan.
[[nodiscard]] std::vector<Trial> trials(Balancer balancer, Recompute choice,
                                        schedule::ScheduleKind kind);

struct MadeCut {
  std::vector<int> counts;  // by stage of placement()
  int rounds = 0;           // diffusion only: its rounds, and the paper's bound on them
  double rounds_bound = 0;
};

// The cut of any balancer but kSearch for the memory of the problem, refined if it is kOptimal's and
// can be. Errors as balance().
[[nodiscard]] Expected<MadeCut> make_cut(CutFor what, Balancer balancer,
                                         const BalanceProblem& problem);

}  // namespace dynmo::plan::internal
