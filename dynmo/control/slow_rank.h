// SPDX-License-Identifier: Apache-2.0
#pragma once

// Detects a rank that has become slower than its layers explain: a hot or shared core, a failing
// card. The planner compensates for it, but the user should know.

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
  double factor = 1;  // slowdown of its least slowed layer, compared with others
};

// Compares the median forward time of every layer over the last 5 steps with the median over the 15
// steps before. Dynamism makes single layers slower or faster. A slow rank slows down all its
// layers. So a rank counts with its least slowed layer. It is slow at 1.5 times the least slowed
// rank. (A rank that became faster counts as unchanged: freezing does that.) It uses forward times
// only, which freezing does not remove. One thread uses it.
class SlowRankDetector {
 public:
  // Adds a step. `layers` are by LayerId, equal on all ranks. Returns a slow rank at most once in
  // 20 steps, and the slowest of several.
  [[nodiscard]] std::optional<SlowRank> add(const std::vector<cost::LayerSample>& layers,
                                            const plan::Plan& plan);

 private:
  std::deque<std::vector<double>> forward_s_;  // by step, by layer
  int quiet_ = 0;                              // steps without a report
};

}  // namespace dynmo::control
