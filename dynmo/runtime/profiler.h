// SPDX-License-Identifier: Apache-2.0
#pragma once

// Turns the layer times of the last steps into costs. It measures every layer in every step (two
// clock reads a layer, 0.004 % of a step), so there is no separate profiling phase; a layer's cost
// is the median over the window. Of what a step takes beside its layers, too.

#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/runtime/engine.h"

namespace dynmo::runtime {

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

class Profiler {
 public:
  // `known` gives names and bytes of every layer; its times are not used.
  Profiler(cost::ModelCost known, int window);

  void add(const std::vector<LayerSample>& layers, const StepSample& step = {});  // by LayerId
  void forget_times();  // what is known of bytes stays
  // Names and bytes of the layers, stashes as metered.
  [[nodiscard]] const cost::ModelCost& known() const { return known_; }
  [[nodiscard]] int steps() const { return static_cast<int>(window_.size()); }

  // Costs with the first `frozen_layers` layers frozen. A layer that the window still saw training
  // keeps its measured forward time; what freezing removes is known without measuring. nullopt
  // before the first step.
  [[nodiscard]] std::optional<cost::ModelCost> costs(int frozen_layers) const;
  // Medians over the steps of the window that measured it, else of the last one that did.
  [[nodiscard]] const StepSample& beside() const { return beside_; }
  // Standard deviation of a layer's cost as `costs` gives it, relative, mean over the layers: from
  // the spread of its forward times over the window, after a slowdown common to all layers of a
  // step is divided out (it moves no decision).
  [[nodiscard]] double relative_noise() const;

 private:
  cost::ModelCost known_;
  std::size_t capacity_;
  std::deque<std::vector<LayerSample>> window_;
  std::deque<StepSample> steps_;
  StepSample beside_;
};

// Mean over the micro-batches of each field: a step takes their sum, outliers included.
[[nodiscard]] LayerTime mean_time(const std::vector<LayerTime>& micro_batches);
[[nodiscard]] double median(std::vector<double> values);  // 0 of nothing

}  // namespace dynmo::runtime
