// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cuts of a balancer that are replayed if layers may be recomputed. They are the same for
// propose() and for the templates of search().

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
// Returns the cuts in the order of trial. For kNone and kWhole it is one.
[[nodiscard]] std::vector<CutFor> cuts_for(Balancer balancer, Recompute choice);

struct MadeCut {
  std::vector<int> counts;  // by stage of placement()
  int rounds = 0;           // diffusion: its rounds, and the paper's bound on them
  double rounds_bound = 0;
};

// Makes the cut of a balancer except kSearch. A cut of kOptimal is refined if possible. Returns the
// errors of balance().
[[nodiscard]] Expected<MadeCut> make_cut(CutFor what, Balancer balancer,
                                         const BalanceProblem& problem);

}  // namespace dynmo::plan::internal
