// SPDX-License-Identifier: Apache-2.0
#pragma once

// Evaluates a plan with given costs: step time, bubble and memory of its schedule, by replay.

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

// The input of a replay, without its plan.
struct Costs {
  const cost::ModelCost& model;
  const cost::Cluster& cluster;
  int micro_batches = 1;

  // Returns the part of a problem that is its costs.
  [[nodiscard]] const Costs& costs() const { return *this; }
};

struct Evaluation {
  sim::SimResult result;
  double step_time_s = 0;
  double ideal_step_time_s = 0;      // M x work / sum of the speeds of all offered ranks
  double bottleneck_s = 0;           // largest work of a rank a micro-batch / its speed
  double imbalance = 0;              // max / mean - 1 of the ranks' work / speed, with idle ranks
  std::vector<double> stage_time_s;  // by stage: work of a micro-batch / speed of its rank
  int micro_batches = 0;             // of the replayed step
  std::vector<int> in_flight;        // by stage: maximum stashes held at once (frozen: 0)
};

// Returns the costs of each stage: sums over its layers. The frozen prefix is forward only and has
// no stash.
[[nodiscard]] std::vector<sim::StageCost> stage_costs(const Plan& plan,
                                                      const cost::ModelCost& model);
// Like the function above, with the reduction of each stage's gradients over the replicas of
// `cluster`.
[[nodiscard]] std::vector<sim::StageCost> stage_costs(const Plan& plan,
                                                      const cost::ModelCost& model,
                                                      const cost::Cluster& cluster);

// Returns the time of a step whose work is spread evenly over the speeds of all ranks.
[[nodiscard]] double ideal_step_s(const Costs& costs);

// Returns each rank's work of a micro-batch / its speed, with update_s / micro_batches.
[[nodiscard]] std::vector<double> rank_times_s(const Plan& plan, const Costs& costs);

// Returns whether the replay's peak memory is within that of every rank.
[[nodiscard]] bool fits_memory(const sim::SimResult& result, const cost::Cluster& cluster);

// Evaluates a plan. Returns kBadInput if plan, model and cluster are inconsistent, or a step would
// exceed the range of nanoseconds.
[[nodiscard]] Expected<Evaluation> evaluate(const Plan& plan, const Costs& costs,
                                            sim::SimOptions options = {});

// Returns whether each rank's memory holds a step under `plan` and also the layers that `migration`
// brings. Requires a valid plan. Returns true if the step cannot be evaluated.
[[nodiscard]] bool holds_both(const Plan& plan, const Migration& migration, const Costs& costs);

// Returns "dynmo-plan-1" (docs/formats.md). `migration` leads from the plan in force to `plan`.
[[nodiscard]] Json plan_json(const Plan& plan, const Evaluation& evaluation,
                             const cost::ModelCost& model, std::string_view balancer,
                             const Migration& migration = {});

}  // namespace dynmo::plan
