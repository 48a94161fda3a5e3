// SPDX-License-Identifier: Apache-2.0
#pragma once

// In other programs a V has two stages on its last rank. In a plan, neighbours on one rank are one
// stage. So that stage and its actions are cut.

#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan::internal {

// Returns the plan with the middle stage of a V as two of about equal work. Any other plan is
// returned as it is, and so is one whose middle stage is a single module. The order is left out.
[[nodiscard]] Plan with_whole_v(const Plan& plan, const cost::ModelCost& model);

// Returns the schedule with `stage` split into two stages on its rank. Each action of the stage
// becomes two, one for each half, in the order of their dependencies. Requires a compute-only
// schedule.
[[nodiscard]] schedule::Schedule with_split_stage(schedule::Schedule order, int stage);

}  // namespace dynmo::plan::internal
