// SPDX-License-Identifier: Apache-2.0
#pragma once

// What one step of training measured, as all ranks agree on it: what the profiler (control/) makes
// costs of.

#include <optional>

#include "dynmo/core/units.h"

namespace dynmo::cost {

// Seconds of one layer for one micro-batch, of its device. A fused B counts as its two halves;
// reading the tokens counts to the first layer's forward, the targets to the last one's.
struct LayerTime {
  double forward_s = 0;
  double input_gradient_s = 0;
  double weight_gradient_s = 0;
};

// One layer in one step: means over the micro-batches.
struct LayerSample {
  LayerTime time;
  double update_s = 0;  // of the step before (the update comes after the exchange)
  Bytes stash_bytes;    // of one micro-batch; 0: not metered in this step
};

// What a step takes beside its layers, as all ranks agreed on it.
struct StepSample {
  std::optional<double> overhead_s;  // after the schedule, beside the update: least of any rank
  std::optional<double> action_s;    // of an action, not waiting: mean over all of all ranks
  std::optional<double> message_s;   // of a message to the next rank whose both ends are posted
  std::optional<double> reduction_bytes_per_s;  // of a ring over the replicas
};

}  // namespace dynmo::cost
