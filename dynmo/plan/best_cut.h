// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cut with the least simulated step time of all cuts there are: what no balancer can beat, and
// so the yardstick for what balancing could have gained at best.

#include <cstdint>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan {

struct BestCut {
  Plan plan;  // one stage a rank, every rank at least one layer
  double step_time_s = 0;
  std::int64_t simulated = 0;  // cuts replayed; the bound ruled out the rest
};

// Exact: a cut is left out only if a lower bound of its step time (fill, the rank's own work,
// drain) exceeds the time of a cut already replayed, or its replay exceeds a rank's memory. Ties go
// to the leftmost cut. kBadInput as `balance` says, and where more than 200,000 cuts stay within
// the bound: fewer layers or ranks, or the optimal balancer, are then the answer. kInfeasible: none
// fits.
[[nodiscard]] Expected<BestCut> best_by_simulation(const cost::ModelCost& model,
                                                   const cost::Cluster& cluster, int micro_batches,
                                                   schedule::ScheduleKind schedule);

}  // namespace dynmo::plan
