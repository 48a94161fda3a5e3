// SPDX-License-Identifier: Apache-2.0
#pragma once

// When to move. Autonomous: it acts when costs have changed by more than their noise and the gain
// over the expected horizon exceeds the measured cost of profiling, planning and moving.
// Deterministic, so every rank decides alike.

#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/plan.h"

namespace dynmo::plan {

struct PolicyOptions {
  Balancer balancer = Balancer::kOptimal;
  double minimum_gain = 0.01;  // least relative gain of step time worth a move: the hysteresis
  double noise_factor = 2;  // gain must exceed this many times the noise of the predicted step time
};

struct PolicyInput {
  const Plan& current;
  const cost::ModelCost& model;  // newest costs, medians
  double relative_noise = 0;     // spread of the costs, relative (0.02 = 2 %)
  const cost::Cluster& cluster;
  int micro_batches = 1;
  double horizon_steps = 0;  // steps for which the gain is expected to last
  double bytes_per_s =
      0;  // measured migration bandwidth; 0: not yet measured, a default is assumed
  double fixed_cost_s = 0;  // measured cost of planning and of a migration of no bytes
};

struct Decision {
  bool migrate = false;
  Plan plan;                  // the plan to run from now on; generation + 1 if migrate
  double current_step_s = 0;  // predicted, by replay
  double planned_step_s = 0;  // of the best plan found, taken or not
  double gain_s = 0;          // over the horizon
  double cost_s = 0;          // of the move
  double imbalance_before = 0;
  double imbalance_after = 0;
  std::string reason;  // one line for people
};

[[nodiscard]] Expected<Decision> decide(const PolicyInput& input,
                                        const PolicyOptions& options = {});

}  // namespace dynmo::plan
