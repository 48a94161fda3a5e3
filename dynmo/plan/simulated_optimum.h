// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cut with the least simulated step time of all cuts. No balancer can be better, so it measures
// the possible gain of balancing.

#include <cstdint>
#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/plan.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan {

struct SimulatedOptimum {
  Plan plan;  // one stage a rank, every rank at least one layer
  double step_time_s = 0;
  std::int64_t simulated = 0;  // replayed cuts; the bound excluded the rest
};

// Finds the best cut exactly. A cut is skipped only if a lower bound of its step time exceeds a
// replayed time. (The bound is fill, the rank's own work, drain.) A cut whose replay exceeds a
// rank's memory does not count. Ties go to the leftmost cut. Returns nullopt if more than 200,000
// cuts are within the bound, which are too many to replay. Returns kBadInput as balance(), and
// kInfeasible if none fits.
[[nodiscard]] Expected<std::optional<SimulatedOptimum>> simulated_optimum(
    const Costs& costs, schedule::ScheduleKind schedule);

// Returns a lower bound for the step of all cuts of one stage a rank. It is the work of the slowest
// rank under the cut that minimizes it, for all micro-batches, without memory limits. Returns the
// errors of balance().
[[nodiscard]] Expected<double> step_time_bound_s(const Costs& costs);

}  // namespace dynmo::plan
