// SPDX-License-Identifier: Apache-2.0
#pragma once

// A lower bound for the replay of a cut with one stage a rank.
//
// Rank r cannot start before the first micro-batch has passed the ranks before it. Then it runs M
// micro-batches and its update. If it trains, its last backward must still pass down to the first
// rank that trains. (In zb-h1, whose weight gradients wait, that is the input gradient.) Messages
// and reductions are not included.

#include <algorithm>

#include "dynmo/cost/layer_cost.h"
#include "dynmo/schedule/generate.h"

namespace dynmo::plan {

// The work of a range of layers at speed 1: seconds of one micro-batch, and of the update.
struct StageWork {
  double forward_s = 0;
  double backward_s = 0;  // passes that precede sending a gradient: I, and W if it does not wait
  double later_s = 0;     // W if it may wait
  double update_s = 0;
  bool trains = false;

  // Adds a layer. `reached` means that a gradient comes to it.
  void add(const cost::LayerCost& layer, bool reached, schedule::ScheduleKind kind) {
    forward_s += layer.forward_s;
    if (!reached) return;
    trains = true;
    backward_s += layer.backward_input_s;
    if (layer.frozen) return;
    (kind == schedule::ScheduleKind::kZbH1 ? later_s : backward_s) += layer.backward_weight_s;
    update_s += layer.update_s;
  }
};

// The bound over the ranks so far.
struct StepBound {
  double bound_s = 0;
  double fill_s = 0;   // F of one micro-batch through them
  double drain_s = 0;  // backward_s of one micro-batch through ranks that train

  // Returns the bound with one more rank.
  [[nodiscard]] StepBound with(const StageWork& work, double speed, int micro_batches) const {
    StepBound next = *this;
    const double own = fill_s + micro_batches * (work.forward_s + work.backward_s) / speed;
    next.bound_s = std::max({bound_s, own + (micro_batches * work.later_s + work.update_s) / speed,
                             own + (work.trains ? drain_s : 0)});
    next.fill_s += work.forward_s / speed;
    next.drain_s += work.backward_s / speed;
    return next;
  }
};

}  // namespace dynmo::plan
