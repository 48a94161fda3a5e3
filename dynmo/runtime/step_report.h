// SPDX-License-Identifier: Apache-2.0
#pragma once

// What one training step did, as one rank tells it.

#include <cstdint>
#include <optional>
#include <vector>

#include "dynmo/control/policy.h"
#include "dynmo/control/profiler.h"
#include "dynmo/core/units.h"
#include "dynmo/schedule/timeline.h"

namespace dynmo::runtime {

// Equal on all ranks except where said.
struct StepReport {
  std::int64_t step = 0;
  double loss = 0;           // mean over the micro-batches
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  int frozen_layers = 0;
  cost::Announced announced = cost::Announced::kNothing;  // before it
  double step_s = 0;                                      // this rank's clock, balancing included
  // By replay of the plan, from costs of the steps before. 0: none yet.
  double predicted_s = 0;
  // By rank of the group: computing in this step and updating at the end of the one before, all
  // between the exchanges of the two steps.
  std::vector<double> busy_s;
  double imbalance = 0;    // max / mean - 1 of busy_s, over the ranks that have layers
  double bubble = 0;       // 1 - mean of busy_s / time between the exchanges, by this clock
  double reduction_s = 0;  // exposed: this rank's time in summing gradients over the replicas
  double profile_s = 0;    // this rank's own
  double plan_s = 0;
  double migrate_s = 0;
  std::optional<control::Decision> decision;  // what the policy said this step, where it was asked
  bool skipped = false;  // no update: loss or norm were no numbers (OnNan::kSkip)
  bool asked = false;    // a rank has something to tell all before the next step
  int moved_layers = 0;
  Bytes moved_bytes;
  std::vector<cost::LayerSample> layers;        // by LayerId, as measured in this step
  std::vector<schedule::TimedAction> actions;   // this rank's, compute
  std::vector<schedule::TimedAction> messages;  // this rank's (StepOutput::messages)
  std::int64_t start_ns = 0;                    // steady clock, of `actions`
};

}  // namespace dynmo::runtime
