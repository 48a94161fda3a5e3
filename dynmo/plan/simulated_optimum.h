// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cut with the least simulated step time of all cuts there are: what no balancer can beat, and
// so the yardstick for what balancing could have gained at best.

#include <cstdint>
#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan {

struct SimulatedOptimum {
  Plan plan;  // one stage a rank, every rank at least one layer
  double step_time_s = 0;
  std::int64_t simulated = 0;  // cuts replayed; the bound ruled out the rest
};

// Exact: a cut is left out only if a lower bound of its step time (fill, the rank's own work,
// drain) exceeds the time of a cut already replayed, or its replay exceeds a rank's memory. Ties go
// to the leftmost cut. nullopt: more than 200,000 cuts stay within the bound, too many to replay
// them all. kBadInput as `balance` says. kInfeasible: none fits.
[[nodiscard]] Expected<std::optional<SimulatedOptimum>> simulated_optimum(
    const cost::ModelCost& model, const cost::Cluster& cluster, int micro_batches,
    schedule::ScheduleKind schedule);

// No cut of one stage a rank has a shorter step, however many there are: the work of the slowest
// rank under the cut that makes it least, for all micro-batches, whatever the memory. Errors as
// `balance`.
[[nodiscard]] Expected<double> step_time_bound_s(const cost::ModelCost& model,
                                                 const cost::Cluster& cluster, int micro_batches);

}  // namespace dynmo::plan
