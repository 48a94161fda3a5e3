// SPDX-License-Identifier: Apache-2.0
#pragma once

// When to move. Autonomous: it acts when costs have changed by more than their noise and the gain
// over the expected horizon exceeds the measured cost of planning and moving.
// Deterministic, so every rank decides alike.

#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/propose.h"
#include "dynmo/plan/recompute.h"

namespace dynmo::control {

// Why a plan is made (controller.h).
enum class Cause {
  kKnown,      // the work has changed as training says, and new costs follow from those before
  kConfirmed,  // the work has changed, and was measured since
  kFound,      // measurements show a change
  kCounted,    // sources count other work than at the last plan
  kWaited,     // the gain that was forgone since a move was too expensive has come to its cost
  kDrift,      // if anything has changed, it was slowly
};

enum class RankUse {
  kAll,     // plans may use every rank of the cluster
  kFewest,  // as few as keep tokens/s within the slack (pack.h): ranks are released, and taken back
};

// How much the predicted gain may be noise: the two step times differ by the work of the two
// bottleneck ranks, each a sum of measured layers, so its variance is about
//   M^2 x (relative_noise^2 x sum over those layers of (work / speed)^2
//        + rank_noise^2 x sum over the ranks that own them now of (their part of the difference)^2)
// The first is what each layer has of its own, the second what the layers of a rank have in common:
// a processor that others use, too, makes them all slower, and moving them seem to gain. It must
// exceed, beside what choosing the slowest of noisy ranks seems to gain by chance (rank_noise x
// sqrt(2 ln n) x T of n ranks within the noise; not where a change follows from what is known),
// `noise_factor` stds, which is also the hysteresis: on costs that only jitter neither the
// move nor the way back is ever worth it. For drift it is high because the proposed cut was chosen
// from the same noisy costs, and because a run looks thousands of times. Where the work has changed
// the gain is less likely an artefact of the noise, and there is one decision a change.
struct PolicyOptions {
  plan::Balancer balancer = plan::Balancer::kOptimal;
  double minimum_gain = 0.01;  // least relative gain of step time worth a move; of counted work
                               // 3/10 of it
  double noise_factor = 5;     // least gain in stds of the predicted difference, for drift;
                               // 3/5 of it where a change was found, or a gain has lasted; 1/5
                               // where a change is known or counted
  RankUse rank_use = RankUse::kAll;
  // kFewest: growth of step time that is accepted for fewer ranks, against all that there were.
  double pack_slack = 0;
  plan::ProposeOptions propose = {};  // effort of search, whether equal ranks may swap
  plan::Recompute recompute = plan::Recompute::kNone;  // of the plans that are weighed
};

struct PolicyInput {
  const plan::Plan& current;
  const cost::ModelCost& model;  // newest costs, medians, without recomputation
  double relative_noise = 0;     // standard deviation of a layer's cost, relative (0.02 = 2 %)
  const cost::Cluster& cluster;
  int micro_batches = 1;
  double horizon_steps = 0;  // steps for which the gain is expected to last
  double bytes_per_s = 0;    // measured migration bandwidth; 0: not yet measured, 1e9 is assumed
  double fixed_cost_s = 0;   // measured cost of planning and of a migration of no bytes
  Cause cause = Cause::kDrift;
  double forgone_s = 0;  // gain that steps have lacked since a move was too expensive
  // Standard deviation of what the costs of the layers of a rank of `current` have in common.
  double rank_noise = 0;
  plan::LayerSet recomputed = {};  // under `current`
  // With RankUse::kFewest: ranks that the slack is measured against, like the cluster's first; at
  // most the cluster's: these.
  int all_ranks = 0;
};

struct Decision {
  bool migrate = false;
  plan::Plan plan;            // the plan to run from now on; generation + 1 if migrate
  plan::LayerSet recomputed;  // under it
  double current_step_s = 0;  // predicted, by replay
  double planned_step_s = 0;  // of the best plan found, taken or not
  double gain_s = 0;          // over the horizon; of fewer ranks: in time of all current ranks
  double cost_s = 0;          // of the move: bytes / bandwidth + fixed
  double noise_s = 0;         // std of current_step_s - planned_step_s
  plan::Migration migration;  // of the plan proposed, taken or not
  double imbalance_before = 0;
  double imbalance_after = 0;
  int ranks_before = 0;        // with layers
  int ranks_after = 0;         // of the best plan found, taken or not
  bool within_noise = false;   // this alone forbade the move; here and below
  bool too_expensive = false;  // its cost
  std::string reason;          // one line for people
  std::string why = {};        // a plan was made at all, as the controller says
};

// The seconds that the plan found would save a step, as decide() weighs them; below 0: it is worse.
[[nodiscard]] double gain_of_step(const Decision& decision);

// Scores the current plan and the balancer's by replay, each with the layers that it recomputes.
// Migrates if the gain of a step exceeds `minimum_gain` and the noise, and if over the horizon,
// with what was forgone, it exceeds the cost. Nobody knows how long a gain lasts: who moves once it
// would have paid for the move loses at most as much again. Migrates at once where the current plan
// no longer fits the memory and the proposed one does. Keeps the current plan where the balancer
// finds none (no feasible cut: the reason says so). kBadInput: input that does not fit together, or
// is negative or NaN.
//
// With RankUse::kFewest a plan on P' of now P ranks gains T - T' P'/P a step, as the ranks released
// are worth their time; a plan on more ranks gains T - T'. T' itself stays within the slack.
[[nodiscard]] Expected<Decision> decide(const PolicyInput& input,
                                        const PolicyOptions& options = {});

// The move to the balancer's plan on `kept` alone, ascending, as the other ranks leave: whatever it
// costs. A schedule kind that so few ranks cannot run becomes 1F1B. kInfeasible: no such plan fits
// the memory. kBadInput as decide.
[[nodiscard]] Expected<Decision> vacate(const PolicyInput& input, const std::vector<Rank>& kept,
                                        const PolicyOptions& options = {});

}  // namespace dynmo::control
