// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs a job on fewer ranks, if that costs no throughput. It selects the ranks to empty, and makes
// a plan that leaves them idle.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/propose.h"

namespace dynmo::plan {

struct PackOptions {
  // The step may take (1 + slack) x the reference. 0: tokens/s of the whole job do not fall.
  double slack = 0;
  // Exact number of ranks, at any step time; 0: as few as the slack allows.
  int ranks = 0;
  double reference_step_s = 0;  // if 0, the step of the balancer's plan on all ranks
  ProposeOptions propose = {};
};

struct Packing {
  Proposal proposal;           // on the whole cluster; the emptied ranks are idle
  std::vector<Rank> released;  // ascending; none if every rank is needed
  double reference_step_s = 0;
};

// Packs onto the fewest ranks. Their plan by `balancer` must have a step time within the slack and
// fit the memory in its replay. Ranks keep the cluster's order. The slowest ranks are emptied
// first. Among equally fast ones these are whole nodes, then the highest ranks. In a cluster of
// equal ranks (speed, memory, links) this choice is optimal. In others of up to 10 ranks all
// choices are tried, this one first. Larger ones try only this choice.
//
// Tries rank counts in increasing order, without those that even perfect balance could not meet.
// With one choice there are at most `ranks` proposals.
//
// Returns kBadInput as propose(), for a negative or NaN slack or reference, and for an unavailable
// number of ranks. Returns kInfeasible if no choice of that many ranks fits.
[[nodiscard]] Expected<Packing> pack(Balancer balancer, const BalanceProblem& problem,
                                     const PackOptions& options = {});

// Returns the balancer's plan on the kept ranks alone, ascending. It is a plan of the whole cluster
// with the others idle. Returns the errors of propose(). Requires at least one rank to keep.
[[nodiscard]] Expected<Proposal> propose_on(const std::vector<Rank>& kept, Balancer balancer,
                                            const BalanceProblem& problem,
                                            const ProposeOptions& options = {});

// Converts a plan with layers on `kept` alone to a plan of a group of these ranks, ascending. The
// generation is kept.
[[nodiscard]] Plan without_others(const Plan& plan, const std::vector<Rank>& kept);
// Returns the plan in a group with further, idle ranks behind its own.
[[nodiscard]] Plan with_more_ranks(Plan plan, int ranks);
// Returns the ranks that have layers, ascending.
[[nodiscard]] std::vector<Rank> ranks_at_work(const Plan& plan);

// Returns the ranks that pack() keeps first, ascending. Requires 1 <= keep <= cluster.size().
[[nodiscard]] std::vector<Rank> ranks_to_keep(const cost::Cluster& cluster, int keep);

}  // namespace dynmo::plan
