// SPDX-License-Identifier: Apache-2.0
#pragma once

// The first plan of a run. It is given by pipeline.cut, or made from costs that are measured before
// the first step.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/control/profiler.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/propose.h"
#include "dynmo/schedule/schedule.h"
#include "dynmo/train/setup/resolved_run.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Returns the schedule of the first plan. If pipeline.schedule is "auto", that is 1F1B, and the
// search for the best starts from it.
[[nodiscard]] schedule::ScheduleKind first_schedule(const config::Config& config);

// Proposes the first plan of a run without pipeline.cut, from the costs of its layers. It follows
// balancer, schedule, recompute and memory of [pipeline]. Returns kBadInput or kInfeasible.
[[nodiscard]] Expected<plan::Proposal> propose_first_plan(const config::Config& config,
                                                          const cost::ModelCost& costs,
                                                          const cost::Cluster& cluster);

// Returns a given plan with its ranks placed by pipeline.place. Layers of a rank stay together.
// Returns the errors of plan::place().
[[nodiscard]] Expected<plan::Plan> placed_by_hosts(const plan::Plan& plan,
                                                   const config::Config& config,
                                                   const cost::ModelCost& costs,
                                                   const cost::Cluster& cluster);

// Checks a pipeline.cut against the ranks of a replica and the layers of the model. Returns
// kBadInput if it does not fit them.
[[nodiscard]] Expected<void> check_cut(const std::vector<std::int64_t>& cut, int ranks, int layers);

// The first plan and, unless it was given, the costs from which it follows. They are measured with
// an even cut and no update.
struct FirstPlan {
  plan::Plan plan;
  std::optional<control::Profiler> profiler;
  plan::Plan measured_under = {};
};

// Makes the first plan, with `cut` if it is not empty. All ranks of the group call it. `cluster`
// has the ranks of a replica. Returns kBadInput, kInfeasible or kPeerLost.
[[nodiscard]] Expected<FirstPlan> first_plan(transport::Transport& transport,
                                             const ResolvedRun& run,
                                             const std::vector<std::int64_t>& cut,
                                             const cost::Cluster& cluster);

// Returns the plan's cut by the names of the layers, for the line below a run's plan.
[[nodiscard]] std::string cut_line(const plan::Plan& plan, const model::Model& layers);

}  // namespace dynmo::train
