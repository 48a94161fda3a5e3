// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plan against costs: the step time, bubble and memory its schedule would have, by replay.

#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/plan.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::plan {

struct Evaluation {
  sim::SimResult result;
  double step_time_s = 0;
  double ideal_step_time_s = 0;  // M x work / sum of the speeds of all ranks offered
  double bottleneck_s = 0;       // largest work of a rank a micro-batch / its speed
  double imbalance = 0;          // max / mean - 1 of the ranks' work / speed, idle ranks included
  std::vector<double> stage_time_s;  // by stage: work of a micro-batch / speed of its rank
  int micro_batches = 0;             // of the step replayed
  std::vector<int> in_flight;        // by stage: most stashes held at once (frozen: 0)
};

// Costs of each stage: sums over its layers, the frozen prefix forward only and without a stash.
[[nodiscard]] std::vector<sim::StageCost> stage_costs(const Plan& plan,
                                                      const cost::ModelCost& model);
// The same with the reduction of each stage's gradients over the replicas of `cluster`.
[[nodiscard]] std::vector<sim::StageCost> stage_costs(const Plan& plan,
                                                      const cost::ModelCost& model,
                                                      const cost::Cluster& cluster);

// Work a micro-batch of each rank / its speed, update_s / micro_batches included.
[[nodiscard]] std::vector<double> rank_times_s(const Plan& plan, const cost::ModelCost& model,
                                               const cost::Cluster& cluster, int micro_batches);

// Whether the replay's peak memory stays within every rank's.
[[nodiscard]] bool fits_memory(const sim::SimResult& result, const cost::Cluster& cluster);

// kBadInput where plan, model and cluster do not fit together, or a step would take longer than
// nanoseconds can count.
[[nodiscard]] Expected<Evaluation> evaluate(const Plan& plan, const cost::ModelCost& model,
                                            const cost::Cluster& cluster, int micro_batches,
                                            sim::SimOptions options = {});

// "dynmo-plan-1" (docs/formats.md); `migration` is what it takes to get there from the plan in
// force.
[[nodiscard]] Json plan_json(const Plan& plan, const Evaluation& evaluation,
                             const cost::ModelCost& model, std::string_view balancer,
                             const Migration& migration = {});

}  // namespace dynmo::plan
