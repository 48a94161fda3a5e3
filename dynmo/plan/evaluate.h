// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plan against costs: the step time, bubble and memory its schedule would have, by replay.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::plan {

struct Evaluation {
  sim::SimResult result;
  double step_time_s = 0;
  double ideal_step_time_s = 0;  // M x work / sum of the speeds of all ranks offered
  double bottleneck_s = 0;       // largest work of a rank a micro-batch / its speed
  double imbalance = 0;          // max / mean - 1 of the ranks' work / speed
};

// Costs of each stage: sums over its layers, the frozen prefix forward only and without a stash.
[[nodiscard]] std::vector<sim::StageCost> stage_costs(const Plan& plan,
                                                      const cost::ModelCost& model);

// kBadInput where plan, model and cluster do not fit together.
[[nodiscard]] Expected<Evaluation> evaluate(const Plan& plan, const cost::ModelCost& model,
                                            const cost::Cluster& cluster, int micro_batches,
                                            sim::SimOptions options = {});

// "dynmo-plan-1" (docs/formats.md).
[[nodiscard]] Json plan_json(const Plan& plan, const Evaluation& evaluation,
                             const cost::ModelCost& model, std::string_view balancer);

}  // namespace dynmo::plan
