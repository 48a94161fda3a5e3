// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cuts of a balancer that are replayed if layers may be recomputed. They are the same for
// propose() and for the templates of search().

#include <optional>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/plan/balance.h"

namespace dynmo::plan::internal {

// The assumption of a cut.
enum class CutFor {
  kPlain,  // nothing is recomputed
  kWhole,  // everything is
  kLeast,  // as little as fits: only balancers that use memory
};
// A cut to try: for the memory of the cluster, or for a rung of the ladder (memory_ladder_impl.h).
struct Trial {
  CutFor what = CutFor::kPlain;
  std::optional<int> rungs_below = {};
  bool last_resort = false;  // only if no rung has a plan
};
inline constexpr int kRungs = 24;  // three octaves

// Returns the cuts in the order of trial. For kNone and kWhole it is one. With several stages a
// rank no balancer knows exactly which of its cuts has the shortest step. A cut for more memory may
// be a slower one. Then balancers that use memory also cut for the rungs of less memory.
[[nodiscard]] std::vector<Trial> trials(Balancer balancer, Recompute choice,
                                        schedule::ScheduleKind kind);

struct MadeCut {
  std::vector<int> counts;  // by stage of placement()
  int rounds = 0;           // diffusion: its rounds, and the paper's bound on them
  double rounds_bound = 0;
};

// Makes the cut of a balancer except kSearch, for the memory of the problem. A cut of kOptimal is
// refined if possible. Returns the errors of balance().
[[nodiscard]] Expected<MadeCut> make_cut(CutFor what, Balancer balancer,
                                         const BalanceProblem& problem);

// The plan of such a cut under the problem's schedule kind, with its order if that is kAdaptive. It
// is not replayed, so it may not fit the memory. Errors as balance() and make_adaptive().
[[nodiscard]] Expected<Plan> plan_of_cut(CutFor what, Balancer balancer,
                                         const BalanceProblem& problem);

}  // namespace dynmo::plan::internal
