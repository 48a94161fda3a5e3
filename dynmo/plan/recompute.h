// SPDX-License-Identifier: Apache-2.0
#pragma once

// Activation recomputation (Chen et al., "Training deep nets with sublinear memory cost", 2016): a
// layer that is recomputed keeps its input alone from F on and runs forward once more at the start
// of its input gradient. Which layers do is not part of a plan but a function of plan and costs
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
  kAuto,   // as few as make every rank's memory do
};
// "none", "whole", "auto". kBadInput naming them.
[[nodiscard]] Expected<Recompute> parse_recompute(std::string_view name);

using LayerSet = std::vector<LayerId>;  // ascending, none twice

// The set of kWhole.
[[nodiscard]] LayerSet all_layers(const cost::ModelCost& model);

// Costs with those layers recomputed: their forward time added to the input gradient's, their stash
// the layer's input. The rest of the planner takes them as any costs. Layers of the frozen prefix
// have nothing to recompute and stay as they are.
[[nodiscard]] cost::ModelCost recomputed(cost::ModelCost model, const LayerSet& layers);

// Returns, for each rank, the most bytes held at once: state, stashes as the replay counts them,
// and the stashes that a second forward brings back: one layer's at a time in B, a stage's from I
// to W where these are apart. Without such layers it is the replay's peak_memory. kBadInput as
// schedule_of says.
[[nodiscard]] Expected<std::vector<Bytes>> peak_memory(const Plan& plan,
                                                       const cost::ModelCost& model,
                                                       int micro_batches, const LayerSet& layers);

// The evaluation of `plan` with `layers` recomputed, given costs without recomputation: the second
// forwards in its times, and in its ranks' peak memory what those bring back. Errors as evaluate.
[[nodiscard]] Expected<Evaluation> evaluate_recomputed(const Plan& plan,
                                                       const cost::ModelCost& model,
                                                       const cost::Cluster& cluster,
                                                       int micro_batches, const LayerSet& layers,
                                                       sim::SimOptions options = {});

// The layers that `plan` recomputes, given costs without recomputation. With kAuto no step is
// longer with more memory:
//
// - With one stage a rank, the set with the least sum of forward times that fits the memory. A
//   rank's memory depends on its own layers and its own list alone, and no step is faster if a
//   stage is slower, so no set gives a shorter step. Exact by branch and bound; a rank on which
//   that would take more than a fixed number of steps gets the best set found by then.
// - With several stages, as few as fit of the rank's layers by seconds a byte: at most one layer
//   above the least sum. A set of the least sum may lengthen a stage although it has more memory.
//
// kBadInput: a plan that does not fit model or cluster. kInfeasible (kAuto) naming rank and bytes:
// not even recomputing all of a rank's layers fits.
[[nodiscard]] Expected<LayerSet> recomputed_layers(Recompute choice, const Plan& plan,
                                                   const cost::ModelCost& model,
                                                   const cost::Cluster& cluster, int micro_batches);

// A plan's replay with the layers that it recomputes.
struct Judged {
  Evaluation evaluation;
  LayerSet recomputed;
};
// Evaluates `plan` with its recomputed_layers(). A plan that does not fit memory is no error: its
// evaluation says so, with kAuto that of all layers recomputed on the ranks that lack memory.
[[nodiscard]] Expected<Judged> judge(Recompute choice, const Plan& plan,
                                     const cost::ModelCost& model, const cost::Cluster& cluster,
                                     int micro_batches);

}  // namespace dynmo::plan
