// SPDX-License-Identifier: Apache-2.0
#pragma once

// The report of one training step on one rank.

#include <cstdint>
#include <optional>
#include <vector>

#include "dynmo/control/policy.h"
#include "dynmo/control/profiler.h"
#include "dynmo/control/rank_speeds.h"
#include "dynmo/core/expected.h"
#include "dynmo/observe/step_facts.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::runtime {

// Equal on all ranks, except for fields that say otherwise and facts of this rank. What only the
// process knows of a step (memory, bytes sent, checkpoints) comes from train/run_log.
struct StepReport : observe::StepFacts {
  std::int64_t step = 0;
  cost::Announced announced = cost::Announced::kNothing;  // before the step
  // For each rank of the group, the seconds that it computed in this step and updated after the
  // previous one. All of it is between the exchanges of the two steps.
  std::vector<double> busy_by_rank;
  // The policy's decision in this step, if it was asked.
  std::optional<control::Decision> decision;
  // The part of migrate_s after the schedule: the gradients of layers that moved during the step.
  double migrate_end_s = 0;
  // Seconds that training stopped for the move before this step. Part of it may be at the end of
  // the previous step.
  double move_pause_s = 0;
  bool skipped = false;  // no update: loss or norm were NaN or Inf (OnNan::kSkip)
  // The error with which all ranks end the run: loss or norm were NaN or Inf (OnNan::kStop).
  std::optional<Error> stop = {};
  // Set if a rank has something to tell all ranks before the next step.
  bool asked = false;
  std::vector<control::SpeedChange> speeds;     // found by this step
  std::vector<cost::LayerSample> layers;        // by LayerId, as measured in this step
  std::vector<schedule::TimedAction> actions;   // this rank's, compute
  std::vector<schedule::TimedAction> messages;  // this rank's (StepOutput::messages)
  std::int64_t start_ns = 0;                    // steady clock, of `actions`
};

}  // namespace dynmo::runtime
