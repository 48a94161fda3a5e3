// SPDX-License-Identifier: Apache-2.0
#pragma once

// The times of a pipeline's stages, shared out over the layers of the stages. A trace has one time
// for each stage, and a plan moves layers between stages.

#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"

namespace dynmo::observe {

struct StageTimes {
  double forward_s = 0;
  double input_s = 0;
  double weight_s = 0;
};

// The layers of the stages, as the user gives them.
struct StageLayers {
  std::vector<int> blocks;  // of each stage, in order; empty: each stage is one layer
  // Costs of all layers by formulas, with "embedding", "blocks.0.attention", ... and "head". A
  // layer's share of its stage is its share of the formulas' time, by pass. It keeps its bytes and
  // its update. Without layers all blocks count alike.
  cost::ModelCost formulas;
  std::string formulas_of;  // their source in messages, such as a file
};

struct SharedTimes {
  cost::ModelCost model;
  std::string rule;  // one line for the user
};

// Divides the times of stages among their layers. The sum over a stage's layers is its time in
// every pass. Without formulas all blocks of a stage are equal. Then the embedding gets what its
// stage takes beyond its blocks, each at the median time of a block in the other stages. So does
// the head. Returns kBadInput if `blocks` does not fit the stages or the formulas.
[[nodiscard]] Expected<SharedTimes> share_out(const std::vector<StageTimes>& stages,
                                              const StageLayers& layers);

}  // namespace dynmo::observe
