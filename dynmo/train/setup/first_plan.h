// SPDX-License-Identifier: Apache-2.0
#pragma once

// The plan that a run starts with: given by pipeline.cut, or made of costs that are measured before
// the first step.

#include <optional>
#include <string>

#include "dynmo/config/config.h"
#include "dynmo/control/profiler.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/propose.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/schedule/schedule.h"
#include "dynmo/train/setup/run_model.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// The schedule of the first plan; 1F1B where pipeline.schedule is "auto", from which the best is
// found.
[[nodiscard]] schedule::ScheduleKind first_schedule(const config::Config& config);

// The first plan of a run without pipeline.cut, from what its layers cost: what balancer, schedule,
// recompute and memory of [pipeline] make of it. kBadInput, kInfeasible.
[[nodiscard]] Expected<plan::Proposal> propose_first_plan(const config::Config& config,
                                                          const cost::ModelCost& costs,
                                                          const cost::Cluster& cluster);

// A plan that was given, with its ranks placed as pipeline.place says. Its layers stay together.
[[nodiscard]] Expected<plan::Plan> placed_by_hosts(const plan::Plan& plan,
                                                   const config::Config& config,
                                                   const cost::ModelCost& costs,
                                                   const cost::Cluster& cluster);

// pipeline.cut against the ranks of a replica and the layers of the model. kBadInput.
[[nodiscard]] Expected<void> check_cut(const config::Config& config, int ranks, int layers);

// The first plan and, unless it was given, the costs it follows from: measured with an even cut and
// no update.
struct FirstPlan {
  plan::Plan plan;
  std::optional<control::Profiler> profiler;
  plan::Plan measured_under = {};
};

// Called by all ranks of the group, whose replicas are `cluster`. kBadInput, kInfeasible;
// kPeerLost.
[[nodiscard]] Expected<FirstPlan> first_plan(transport::Transport& transport, const RunModel& made,
                                             const config::Config& config,
                                             const cost::Cluster& cluster,
                                             const runtime::Pipeline::Batches& batches);

// The plan's cut by the names of the layers, as the line below a run's plan says it.
[[nodiscard]] std::string cut_line(const plan::Plan& plan, const model::Model& layers);

}  // namespace dynmo::train
