// SPDX-License-Identifier: Apache-2.0
#pragma once

// One rank's times of its own part of the newest step. Some of them go to the other ranks
// (exchange.h).

#include <functional>
#include <map>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/tie.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/exchange.h"

namespace dynmo::runtime {

struct RankTimes {
  std::map<LayerId, double> update_s;
  double update_total_s = 0;
  // Sets the two members above for the newest update. Call it when the host has waited for the
  // device, in the next step. Empty if they are known.
  std::function<void(RankTimes&)> read_update = {};
  double schedule_s = 0;   // its rounds without reducing
  double reduction_s = 0;  // exposed, in summing gradients over the replicas
  double reducing_s = 0;   // part of reduction_s within actions
  double moving_s = 0;     // between actions, in sending layers that move
  double after_exchange_s = 0;
  // The last measured values, or 0 before the first.
  double overhead_s = 0;  // of a step, except for its schedule and update
  double message_s = 0;
  double reduction_bytes_per_s = 0;
};

// Returns this rank's part of the exchange, except for the costs of planning and moving.
[[nodiscard]] RankStats own_figures(const LayerStates& states, const StepOutput& output,
                                    const RankTimes& times, const plan::LayerSet& recomputed,
                                    const std::vector<model::Tie>& ties);

}  // namespace dynmo::runtime
