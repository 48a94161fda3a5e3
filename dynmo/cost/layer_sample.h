// SPDX-License-Identifier: Apache-2.0
#pragma once

// A sample holds the measurements of one training step, as all ranks agree on them. The profiler
// (control/) converts samples into costs.

#include <cstdint>
#include <optional>
#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/cost/layer_cost.h"

namespace dynmo::cost {

// Seconds of one layer for one micro-batch, on its device. A fused B counts as its two halves. The
// forward pass of the first layer includes reading the tokens. That of the last layer includes
// reading the targets.
struct LayerTime {
  double forward_s = 0;
  double input_gradient_s = 0;
  double weight_gradient_s = 0;
  friend bool operator==(const LayerTime&, const LayerTime&) = default;
};

// One layer in one step: means over the micro-batches.
struct LayerSample {
  LayerTime time;
  double update_s = 0;        // of the step before (the update comes after the exchange)
  Bytes stash_bytes;          // of one micro-batch; 0: not metered in this step
  Bytes boundary_bytes = {};  // mean sent if it ends a stage; 0: as known before
  // Work of the step as the layer's source counts it, in any unit; 0: not counted.
  double work = 0;
  friend bool operator==(const LayerSample&, const LayerSample&) = default;
};

// Returns the sample of a layer with these costs if everything takes `factor` times as long.
[[nodiscard]] inline LayerSample sample_of(const LayerCost& layer, double factor = 1) {
  return {.time = {.forward_s = factor * layer.forward_s,
                   .input_gradient_s = factor * layer.backward_input_s,
                   .weight_gradient_s = factor * layer.backward_weight_s},
          .update_s = factor * layer.update_s,
          .stash_bytes = layer.activation_bytes,
          .boundary_bytes = layer.boundary_bytes};
}

// Returns the sample if everything takes `factor` times as long.
[[nodiscard]] inline LayerSample scaled(LayerSample sample, double factor) {
  sample.time.forward_s *= factor;
  sample.time.input_gradient_s *= factor;
  sample.time.weight_gradient_s *= factor;
  sample.update_s *= factor;
  return sample;
}

// The overhead of a step outside its layers, as all ranks agreed on it.
struct StepSample {
  std::optional<double> overhead_s;  // after the schedule, without the update: minimum of all ranks
  std::optional<double> action_s;    // of an action without waiting: mean over all actions
  std::optional<double> message_s;   // of a message to the next rank after both ends are posted
  std::optional<double> reduction_bytes_per_s;  // of a ring over the replicas
  friend bool operator==(const StepSample&, const StepSample&) = default;
};

// The cost of planning and moving so far.
struct Charges {
  double plan_s = 0;
  double move_fixed_s = 0;  // of a move of no bytes
  double bytes_per_s = 0;   // of a move; 0: not yet measured
  friend bool operator==(const Charges&, const Charges&) = default;
};

// One step, with the same values on all ranks.
struct Observation {
  std::vector<LayerSample> layers;  // by LayerId
  StepSample overhead = {};
  Charges charges = {};
  std::int64_t steps = 1;  // steps that it stands for, itself included, as not all are measured
  friend bool operator==(const Observation&, const Observation&) = default;
};

// Announces a change of costs that a training knows of before it is measured.
enum class Announced {
  kNothing,    // drift is only seen in the costs
  kWork,       // the work of layers has changed: new costs have to be measured
  kPredicted,  // it has, and LayerCost::product_time says how: weights were pruned
  kKnown,      // new costs follow from those before: layers froze, ranks came or left
};

}  // namespace dynmo::cost
