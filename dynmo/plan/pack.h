// SPDX-License-Identifier: Apache-2.0
#pragma once

// The same job on fewer ranks, where that costs no throughput: which ranks to empty, and the plan
// that leaves them idle.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/propose.h"

namespace dynmo::plan {

struct PackOptions {
  // The step may take (1 + slack) x the reference. 0: tokens/s of the whole job do not fall.
  double slack = 0;
  // This many ranks, whatever the step then takes; 0: as few as the slack allows.
  int ranks = 0;
  double reference_step_s = 0;  // 0: that of the balancer's plan on all ranks
  ProposeOptions propose = {};
};

struct Packing {
  Proposal proposal;           // on the whole cluster; the emptied ranks are idle
  std::vector<Rank> released;  // ascending; none where every rank is needed
  double reference_step_s = 0;
};

// The fewest ranks whose plan by `balancer` has a step time within the slack and fits the memory in
// its replay. Ranks keep the cluster's order. Emptied first: the slowest; of equally fast ones
// whole nodes, then the highest ranks. In a cluster of equal ranks (speed, memory, links) no other
// choice could do better. In another of up to 10 ranks all choices are tried, that one first; in
// larger ones that one alone.
//
// Tries rank counts in increasing order, skipping those that even perfect balance could not meet:
// at most `ranks` proposals where one choice is tried.
//
// kBadInput as `propose`, and for a slack or reference that is negative or NaN, or a number of
// ranks that the cluster does not have. kInfeasible: no choice of that many ranks fits.
[[nodiscard]] Expected<Packing> pack(Balancer balancer, const BalanceProblem& problem,
                                     const PackOptions& options = {});

// The balancer's plan on the kept ranks alone, ascending, as a plan of the whole cluster in which
// the others are idle. Errors as `propose`. Requires at least one rank to keep.
[[nodiscard]] Expected<Proposal> propose_on(const std::vector<Rank>& kept, Balancer balancer,
                                            const BalanceProblem& problem,
                                            const ProposeOptions& options = {});

// A plan whose layers lie on `kept` alone, ascending, as one of a group of just these; its
// generation is kept.
[[nodiscard]] Plan without_others(const Plan& plan, const std::vector<Rank>& kept);
// The plan in a group that has more ranks behind its own, which are idle.
[[nodiscard]] Plan with_more_ranks(Plan plan, int ranks);
// Ranks that have layers, ascending.
[[nodiscard]] std::vector<Rank> ranks_at_work(const Plan& plan);

// The ranks that `pack` keeps first, ascending. Requires 1 <= keep <= cluster.size().
[[nodiscard]] std::vector<Rank> ranks_to_keep(const cost::Cluster& cluster, int keep);

}  // namespace dynmo::plan
