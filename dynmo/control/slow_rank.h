// SPDX-License-Identifier: Apache-2.0
#pragma once

// Notices a rank that has become slower than its layers explain: a hot or shared core, a failing
// card. The planner works around it; a person should know.

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/plan/plan.h"

namespace dynmo::control {

struct SlowRank {
  Rank rank;
  double factor = 1;  // how much longer the least slowed of its layers takes, compared with others
};

// Compares the median forward time of every layer over the last 5 steps with that over the 15
// before. Dynamism makes single layers slower or faster, a slow rank all that are on it: a rank
// counts with the layer that has slowed least, and is slow at 1.5 times the rank that has slowed
// least (one that became faster counts as unchanged: freezing does that). Forward times only, which
// freezing does not remove. One thread.
class SlowRankDetector {
 public:
  // One step; `layers` by LayerId, as all ranks have them. A rank at most once in 20 steps; of
  // several the slowest.
  [[nodiscard]] std::optional<SlowRank> add(const std::vector<cost::LayerSample>& layers,
                                            const plan::Plan& plan);

 private:
  std::deque<std::vector<double>> forward_s_;  // by step, by layer
  int quiet_ = 0;                              // steps in which nothing is said
};

}  // namespace dynmo::control
