// SPDX-License-Identifier: Apache-2.0
#pragma once

// Turns the layer times of the last steps into costs. It measures every layer in every step (two
// clock reads a layer, 0.004 % of a step), so there is no separate profiling phase. Of what a step
// takes beside its layers, too.
//
// What share of a step's forward time each of a layer's times is, is the median over a window that
// grows, up to 8 times its least length, until a layer's newest shares differ from the older ones
// by more than noise, forward or in all; then the older ones go. How long the steps take is the
// median over the newest three alone: a machine that is slower for a while changes no share.

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
  // `known` gives names and bytes of every layer; its times are not used. `window`: least length,
  // steps.
  Profiler(cost::ModelCost known, int window);

  // Layers by LayerId; `owners`, their ranks, tell what a rank's layers have in common.
  void add(const std::vector<LayerSample>& layers, const std::vector<Rank>& owners,
           const StepSample& step = {});
  void forget_times();  // what is known of bytes stays
  // The layers' work has changed for a known cause: back to the least window.
  void shorten();
  // Names and bytes of the layers, stashes as metered.
  [[nodiscard]] const cost::ModelCost& known() const { return known_; }
  [[nodiscard]] int steps() const { return static_cast<int>(window_.size()); }  // in the window

  // Costs with the first `frozen_layers` layers frozen. A layer that the window still saw training
  // keeps its measured forward time; what freezing removes is known without measuring. nullopt
  // before the first step.
  [[nodiscard]] std::optional<cost::ModelCost> costs(int frozen_layers) const;
  // Medians over the newest steps, the least window's, that measured it, else of the last one that
  // did.
  [[nodiscard]] const StepSample& beside() const { return beside_; }
  // Standard deviation of what a layer's cost as `costs` gives it has of its own, relative, mean
  // over the layers: from how its share of its rank's forward time changes from one step to the
  // next under the same plan. A slowdown common to all layers moves no decision.
  [[nodiscard]] double relative_noise() const;
  // The same of what the layers of a rank have in common (a processor that others use, too): from
  // how the ranks' sums change. 0 of one rank.
  [[nodiscard]] double rank_noise() const;

 private:
  struct Sample {
    std::vector<LayerSample> layers;
    std::vector<Rank> owners;
    StepSample beside;
    double forward_s = 0;  // of all layers
    // Of each layer: its share of its rank's forward time, and that one's relative change since the
    // step before (empty: another plan).
    std::vector<double> own_shares = {};
    std::vector<double> own_changes = {};
  };

  void note_ranks(const std::map<Rank, double>& sums, bool same_plan);
  void drop_outdated();
  // Relative, of one step's value: of a layer (mean over the layers), of a rank.
  [[nodiscard]] double layer_deviation() const;
  [[nodiscard]] double rank_deviation() const;
  // Deviation of a median over the window to that of one step's value.
  [[nodiscard]] double median_error() const;

  cost::ModelCost known_;
  std::size_t least_;
  std::deque<Sample> window_;
  StepSample beside_;
  std::vector<double> rank_levels_;  // in the newest step: logarithms of the ranks' sums, mean 0
  std::deque<double> rank_changes_;  // one step's deviations, from its change to the next
};

// Mean over the micro-batches of each field: a step takes their sum, outliers included.
[[nodiscard]] LayerTime mean_time(const std::vector<LayerTime>& micro_batches);
[[nodiscard]] double median(std::vector<double> values);  // 0 of nothing

}  // namespace dynmo::runtime
