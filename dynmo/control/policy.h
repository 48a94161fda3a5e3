// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decides when to move. It is autonomous. It acts if costs have changed by more than their noise.
// The gain over the expected horizon must exceed the measured cost of planning and moving.
// Deterministic, so every rank makes the same decision.

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

// The cause of a plan (controller.h).
enum class Cause {
  kKnown,      // training has announced a change, and new costs follow from known ones
  kLost,       // ranks were lost
  kConfirmed,  // the work has changed, and was measured since
  kFound,      // the newest measurements show a change
  kCounted,    // sources count other work than at the last plan
  // A move was too expensive, and the gain lost since then reaches its cost.
  kWaited,
  kDrift,  // no other cause: costs have changed slowly
};

enum class RankUse {
  kAll,  // plans may use every rank of the cluster
  // The fewest ranks that keep tokens/s within the slack (pack.h). Ranks are released, and used
  // again.
  kFewest,
};

// The predicted gain may be noise. The two step times differ by the work of the two bottleneck
// ranks, each a sum of measured layers. So the variance of their difference is about
//
//   M^2 x (relative_noise^2 x sum over those layers of (work / speed)^2
//        + rank_noise^2 x sum over the ranks that own them now of (their part of the difference)^2)
//
// The first term is each layer's own noise. The second is the common noise of a rank's layers. For
// example, a processor with other load makes all of them slower, so that moving them seems to gain.
//
// The gain must exceed `noise_factor` stds. This is also the hysteresis: if costs only jitter,
// neither the move nor its reversal pays. The gain must also exceed what appears by chance, because
// the slowest of several noisy ranks was chosen. That is rank_noise x sqrt(2 ln n) x T, for n ranks
// within the noise. This second condition is omitted if a change follows from known costs.
//
// For drift `noise_factor` is high. The proposed cut was chosen from the same noisy costs, and a
// run checks thousands of times. After a change of the work, the gain is less likely an artefact of
// the noise. There is also only one decision for each change.
struct PolicyOptions {
  plan::Balancer balancer = plan::Balancer::kOptimal;
  // Minimum relative gain of step time for a move. For counted work it is 3/10 of this.
  double minimum_gain = 0.01;
  // Minimum gain in stds of the predicted difference, for drift. It is 3/5 of this if a change was
  // found or a gain has lasted. It is 1/5 if a change is known or counted.
  double noise_factor = 5;
  RankUse rank_use = RankUse::kAll;
  // kFewest: accepted growth of step time for fewer ranks, against all original ranks.
  double pack_slack = 0;
  plan::ProposeOptions propose = {};  // effort of search, whether equal ranks may be swapped
  plan::Recompute recompute = plan::Recompute::kNone;  // of the compared plans
};

struct PolicyInput {
  const plan::Plan& current;
  const cost::ModelCost& model;  // newest costs, medians, without recomputation
  double relative_noise = 0;     // standard deviation of a layer's cost, relative (0.02 = 2 %)
  const cost::Cluster& cluster;
  int micro_batches = 1;
  double horizon_steps = 0;  // expected duration of the gain
  double bytes_per_s = 0;    // measured migration bandwidth; 0: not measured, use 1e9
  double fixed_cost_s = 0;   // measured cost of planning and of a migration of no bytes
  Cause cause = Cause::kDrift;
  double forgone_s = 0;  // gain lost since a move was too expensive
  // Standard deviation of the common part of the costs of a rank's layers under `current`.
  double rank_noise = 0;
  plan::LayerSet recomputed = {};  // under `current`
  // RankUse::kFewest: the number of ranks to which the slack refers, each like the cluster's first.
  // If it is not above the cluster's number, the slack refers to the cluster.
  int all_ranks = 0;
};

struct Decision {
  bool migrate = false;
  plan::Plan plan;            // for the next steps; generation + 1 if migrate
  plan::LayerSet recomputed;  // under it
  double current_step_s = 0;  // predicted, by replay
  double planned_step_s = 0;  // of the best plan found, taken or not
  double gain_s = 0;          // over the horizon; with fewer ranks: in time of all current ranks
  double cost_s = 0;          // of the move: bytes / bandwidth + fixed
  double noise_s = 0;         // std of current_step_s - planned_step_s
  plan::Migration migration;  // of the plan proposed, taken or not
  double imbalance_before = 0;
  double imbalance_after = 0;
  int ranks_before = 0;        // with layers
  int ranks_after = 0;         // of the best plan found, taken or not
  bool within_noise = false;   // the only reason against the move is noise
  bool too_expensive = false;  // ... is its cost
  std::string reason;          // one line for the user
  std::string why = {};        // cause of the plan, from the controller
};

// Returns the seconds that the best plan found saves in a step, as decide() weighs them. The result
// is below 0 if that plan is worse.
[[nodiscard]] double gain_of_step(const Decision& decision);

// Decides about a move. Scores the current plan and the balancer's by replay, each with the layers
// that it recomputes. Migrates if the gain of a step exceeds `minimum_gain` and the noise. Over the
// horizon, with the gain lost so far, it must also exceed the cost. The future duration of a gain
// is unknown. A move made when the lost gain equals the cost loses at most twice the unavoidable
// loss.
//
// Migrates at once if the current plan no longer fits the memory and the proposed one does. Keeps
// the current plan, with a reason, if the balancer finds no feasible cut. Returns kBadInput for
// input that is inconsistent, negative or NaN.
//
// If the balancer's cut is the current one, only the recomputed layers of the decision may differ.
//
// With RankUse::kFewest, T is the current step time on P ranks, and T' that of the plan on P'
// ranks. For P' <= P the gain of a step is T - T' P'/P, because released ranks are worth their
// time. A plan on more ranks gains T - T'. T' itself stays within the slack.
[[nodiscard]] Expected<Decision> decide(const PolicyInput& input,
                                        const PolicyOptions& options = {});

// Returns the move to the balancer's plan on `kept` alone, ascending, at any cost, because the
// other ranks leave. A schedule kind that does not run on these ranks becomes 1F1B. Returns
// kInfeasible if no such plan fits the memory, and kBadInput as decide().
[[nodiscard]] Expected<Decision> vacate(const PolicyInput& input, const std::vector<Rank>& kept,
                                        const PolicyOptions& options = {});

// Returns the move to a plan for `input.cluster`, the ranks that are left after a loss.
// `input.current` is the plan before. It may have other ranks, so nothing is compared with it. The
// plan is made quickly, by Balancer::kOptimal. It keeps the schedule kind, or has 1F1B if the ranks
// have no plan of that kind. Returns kInfeasible if no such plan fits the memory, and kBadInput as
// decide().
[[nodiscard]] Expected<Decision> after_loss(const PolicyInput& input,
                                            const PolicyOptions& options = {});

}  // namespace dynmo::control
