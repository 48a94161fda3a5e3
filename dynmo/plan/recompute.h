// SPDX-License-Identifier: Apache-2.0
#pragma once

// Activation recomputation (Chen et al., "Training deep nets with sublinear memory cost", 2016).
// From F on, a recomputed layer keeps only its input. It runs forward again at the start of its
// input gradient. The set of such layers is not part of a plan but a function of plan and costs
// (docs/decisions/007-recomputed-layers-follow-from-plan-and-costs.md).

#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/plan.h"

namespace dynmo::plan {

enum class Recompute {
  kNone,
  kWhole,  // every layer but the first, which has no input to start from
  kAuto,   // the set with least time that fits every rank's memory
};
// Parses "none", "whole" or "auto". Returns kBadInput with these names.
[[nodiscard]] Expected<Recompute> parse_recompute(std::string_view name);

using LayerSet = std::vector<LayerId>;  // ascending, without duplicates

// Returns the layers that kWhole recomputes.
[[nodiscard]] LayerSet all_layers(const cost::ModelCost& model);

// Returns the costs with those layers recomputed. Their forward time is added to the input
// gradient's, and their stash is the layer's input. The rest of the planner uses them as any costs.
// Layers of the frozen prefix have nothing to recompute and do not change.
[[nodiscard]] cost::ModelCost recomputed(cost::ModelCost model, const LayerSet& layers);

// Returns, for each rank, the maximum of bytes held at once. They are state, stashes as in the
// replay, and stashes that a second forward restores. A fused B restores one layer at a time, from
// the last one on, and frees it before the next one. With separate I and W, a stage's stashes are
// restored from I to W. Without recomputed layers the result is the replay's peak_memory. Returns
// kBadInput as schedule_of().
[[nodiscard]] Expected<std::vector<Bytes>> peak_memory(const Plan& plan,
                                                       const cost::ModelCost& model,
                                                       int micro_batches, const LayerSet& layers);

// Returns the evaluation of `plan` with `layers` recomputed. The given costs are without
// recomputation. The times have the second forwards, and peak memory has the restored stashes.
// Returns the errors of evaluate().
[[nodiscard]] Expected<Evaluation> evaluate_recomputed(const Plan& plan, const Costs& costs,
                                                       const LayerSet& layers,
                                                       sim::SimOptions options = {});

// Returns the layers that `plan` recomputes. The given costs are without recomputation. With kAuto,
// each rank gets the set that fits its memory with the least sum of forward times.
//
// A rank's memory depends only on its own layers and the order of its own list. No step is faster
// if a stage is slower. So with one stage a rank no set gives a shorter step. With several stages a
// rank the work added to the rank is least. Exact by branch and bound. If that would exceed a fixed
// number of steps, the rank gets the best set found by then. Deterministic.
//
// Returns kBadInput if the plan does not fit model or cluster. Returns kInfeasible (kAuto) with
// rank and bytes if even recomputing all of a rank's layers does not fit.
[[nodiscard]] Expected<LayerSet> recomputed_layers(Recompute choice, const Plan& plan,
                                                   const Costs& costs);

// A plan's replay with the layers that it recomputes.
struct Judged {
  Evaluation evaluation;
  LayerSet recomputed;
};
// Evaluates `plan` with its recomputed_layers(). A plan that does not fit memory is not an error,
// but its evaluation shows it. With kAuto, ranks that lack memory then recompute all layers.
[[nodiscard]] Expected<Judged> judge(Recompute choice, const Plan& plan, const Costs& costs);

}  // namespace dynmo::plan
