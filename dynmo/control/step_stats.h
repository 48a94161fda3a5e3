// SPDX-License-Identifier: Apache-2.0
#pragma once

// The figures of a step that all ranks know, from those that each rank has measured. Both
// `dynmo train` (runtime/exchange.h) and `dynmo.torch` call these functions.

#include <span>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/plan/plan.h"

namespace dynmo::control {

// The measurements of one rank in a step, which all ranks receive.
struct RankFigures {
  double busy_s = 0;
  double overhead_s = 0;  // of the previous step, without its schedule and update
  double plan_s = 0;
  double migrate_s = 0;
  double action_overhead_s = 0;  // of its actions, without layers and waiting
  double actions = 0;
  // This value and the next are 0 if this rank has not measured them.
  double message_s = 0;
  double reduction_bytes_per_s = 0;
};

// The figures of a step, combined over the ranks. `overhead_s` and the reduction's bandwidth are
// minima. `action_s` is the mean over all actions, and `message_s` the mean over the ranks.
struct StepStats {
  cost::StepSample overhead;
  double plan_s = 0;  // here and below the maximum
  double migrate_s = 0;
  friend bool operator==(const StepStats&, const StepStats&) = default;
};
[[nodiscard]] StepStats step_stats(std::span<const RankFigures> ranks);

// Returns max / mean - 1 of `busy_s`, over the ranks that have layers under `plan`; 0 if none of
// them was busy. With replicas, `positions` holds each rank's position in its pipeline.
[[nodiscard]] double imbalance(std::span<const double> busy_s, std::span<const Rank> positions,
                               const plan::Plan& plan);
// Returns the mean idle share of all ranks within `step_s`, the time between the exchanges of two
// steps.
[[nodiscard]] double bubble(std::span<const double> busy_s, double step_s);

}  // namespace dynmo::control
