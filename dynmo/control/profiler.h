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
#include "dynmo/cost/layer_sample.h"

namespace dynmo::control {

class Profiler {
 public:
  // `known` gives names and bytes of every layer; its times are not used. `window`: least length,
  // steps.
  Profiler(cost::ModelCost known, int window);

  // Layers by LayerId; `owners`, their ranks, tell what a rank's layers have in common.
  void add(const std::vector<cost::LayerSample>& layers, const std::vector<Rank>& owners,
           const cost::StepSample& step = {});
  void forget_times();  // what is known of bytes stays
  // The layers' work has changed for a known cause: back to the least window.
  void shorten();
  // Names and bytes of the layers, stashes as metered.
  [[nodiscard]] const cost::ModelCost& known() const { return known_; }
  // The same with the first layers frozen.
  [[nodiscard]] cost::ModelCost known(int frozen_layers) const;
  [[nodiscard]] int steps() const { return static_cast<int>(window_.size()); }  // in the window

  // Costs with the first `frozen_layers` layers frozen. A layer that the window still saw training
  // keeps its measured forward time; what freezing removes is known without measuring. nullopt
  // before the first step.
  [[nodiscard]] std::optional<cost::ModelCost> costs(int frozen_layers) const;
  // Medians over the newest steps, the least window's, that measured it, else of the last one that
  // did.
  [[nodiscard]] const cost::StepSample& beside() const { return beside_; }
  // Standard deviation of what a layer's cost as `costs` gives it has of its own, relative, mean
  // over the layers: from how its share of its rank's forward time changes from one step to the
  // next under the same plan. A slowdown common to all layers moves no decision.
  [[nodiscard]] double relative_noise() const;
  // The same of what the layers of a rank have in common (a processor that others use, too): from
  // how the ranks' sums change. 0 of one rank.
  [[nodiscard]] double rank_noise() const;

 private:
  struct Sample {
    std::vector<cost::LayerSample> layers;
    std::vector<Rank> owners;
    cost::StepSample beside;
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
  cost::StepSample beside_;
  std::vector<double> rank_levels_;  // in the newest step: logarithms of the ranks' sums, mean 0
  std::deque<double> rank_changes_;  // one step's deviations, from its change to the next
};

// Mean over the micro-batches of each field: a step takes their sum, outliers included.
[[nodiscard]] cost::LayerTime mean_time(const std::vector<cost::LayerTime>& micro_batches);

}  // namespace dynmo::control
