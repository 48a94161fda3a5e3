// SPDX-License-Identifier: Apache-2.0
#pragma once

// A step report describes one training step on one rank.

#include <cstdint>
#include <optional>
#include <vector>

#include "dynmo/control/policy.h"
#include "dynmo/control/profiler.h"
#include "dynmo/core/expected.h"
#include "dynmo/observe/step_facts.h"
#include "dynmo/schedule/timeline.h"

namespace dynmo::runtime {

// Equal on all ranks except where said, and for the facts that are this rank's. What only the
// process knows of a step (memory, bytes sent, checkpoints) is added by train/run_log.
struct StepReport : observe::StepFacts {
  std::int64_t step = 0;
  cost::Announced announced = cost::Announced::kNothing;  // before it
  // For each rank of the group: computing in this step and updating at the end of the one before,
  // all between the exchanges of the two steps.
  std::vector<double> busy_by_rank;
  std::optional<control::Decision> decision;  // what the policy said this step, where it was asked
  // The part of migrate_s after the schedule: gradients of layers that move while the step runs.
  double migrate_end_s = 0;
  // Training stood still so long for the move before this step: also at the end of the one before.
  double move_pause_s = 0;
  bool skipped = false;                   // no update: loss or norm were NaN or Inf (OnNan::kSkip)
  std::optional<Error> stop = {};         // all end the run: the same with OnNan::kStop
  bool asked = false;                     // a rank has something to tell all before the next step
  std::vector<cost::LayerSample> layers;  // by LayerId, as measured in this step
  std::vector<schedule::TimedAction> actions;   // this rank's, compute
  std::vector<schedule::TimedAction> messages;  // this rank's (StepOutput::messages)
  std::int64_t start_ns = 0;                    // steady clock, of `actions`
};

}  // namespace dynmo::runtime
