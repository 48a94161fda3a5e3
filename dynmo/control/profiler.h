// SPDX-License-Identifier: Apache-2.0
#pragma once

// Turns the layer times of the last steps into costs, and notices when they change. It measures
// every layer in every step (two clock reads a layer, 0.004 % of a step), so there is no separate
// profiling phase. It also measures a step's overhead outside the layers.
//
// Each time is kept as its share of the step's forward time; the estimate is the median share over
// a window that grows, up to 8 times its least length, while nothing changes. How long the steps
// take is the median over the newest three alone: a machine that is slower for a while changes no
// share.
//
// Where the newest steps are of other work than the older ones (find_change.h), the older ones are
// scaled to it, so that the window stays long and a change of one layer makes no other uncertain.
//
// Where weights were pruned, costs that were measured before follow for what is left
// (LayerCost::product_time) until the next step has measured them.
//
// Where sources count the work of layers (LayerSample::work), what is estimated is the time of a
// unit of work: the older steps of the window are scaled to the work of the newest one, so that a
// count that changes needs no new measurement.
//
// A frozen layer has no backward pass to measure. It counts with the one that it last had, so that
// its costs are known when it trains again.

#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "dynmo/control/find_change.h"
#include "dynmo/control/noise_meter.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/layer_sample.h"

namespace dynmo::control {

class Profiler {
 public:
  // `known` gives names and bytes of every layer; its times are not used. `window`: least length,
  // steps. `relevant`: share of the mean rank's time that a change must come to.
  Profiler(cost::ModelCost known, int window, double relevant = 0.01);

  // Layers by LayerId; `owners`, their ranks. Says where the newest steps are of other work. The
  // first `frozen_layers` ran forward only, and count so.
  std::optional<FoundChange> add(const std::vector<cost::LayerSample>& layers,
                                 const std::vector<Rank>& owners, const cost::StepSample& step = {},
                                 int frozen_layers = 0);
  // The work of the layers is another from the next step on: with it the window begins anew. The
  // noise is still that of the machine.
  void restart() { outdated_ = true; }
  void forget_times();  // noise included; what is known of bytes stays
  // Names and bytes of the layers, stashes as metered.
  [[nodiscard]] const cost::ModelCost& known() const { return known_; }
  // Replaces them, but for what was measured: the bytes of stashes, of boundaries. Where products
  // take another time from now on the window begins anew with the next step.
  void know(cost::ModelCost known);
  // The same with the first layers frozen.
  [[nodiscard]] cost::ModelCost known(int frozen_layers) const;
  // The observations of the window, as measured or scaled.
  [[nodiscard]] std::vector<cost::Observation> observations() const;
  [[nodiscard]] int steps() const { return static_cast<int>(window_.size()); }  // in the window

  // The measured times in `known`, which says what is frozen, how large everything is and what the
  // products take. A layer that the window still saw training keeps its forward time; what freezing
  // removes is known without measuring, and so is what comes back when a layer trains again.
  // nullopt before the first step.
  [[nodiscard]] std::optional<cost::ModelCost> costs(cost::ModelCost known) const;
  [[nodiscard]] std::optional<cost::ModelCost> costs(int frozen_layers) const {
    return costs(known(frozen_layers));
  }
  // Medians over the newest steps, the least window's, that measured it, else of the last one that
  // did.
  [[nodiscard]] const cost::StepSample& overhead() const { return overhead_; }
  // Standard deviation of what a layer's cost as `costs` gives it has of its own, relative, mean
  // over the layers: from how its share of its rank's forward time changes from one step to the
  // next under the same plan. A slowdown common to all layers moves no decision.
  [[nodiscard]] double relative_noise() const;
  // The same of what the layers of a rank have in common (a processor that others use, too): from
  // how the ranks' sums change. 0 of one rank.
  [[nodiscard]] double rank_noise() const;
  // The newest counted work of each layer, 0 where nobody counts it; empty before the first step.
  [[nodiscard]] const std::vector<double>& work() const { return work_; }
  // Standard deviation of what a layer's counted work differs from that of the step before,
  // relative, mean over the layers that have one.
  [[nodiscard]] double work_noise() const { return noise_.work(); }

  // Ranks have come or gone: rank i of the next steps was `before[i]`, or is new.
  void ranks_changed(const std::vector<std::optional<Rank>>& before);
  // Returns the state from which restore() makes another profiler, of equal arguments, continue as
  // this one would.
  [[nodiscard]] Json state() const;
  // kInternal where `state` is not of such a profiler; then this one is not to be used.
  [[nodiscard]] Expected<void> restore(const Json& state);

 private:
  struct Sample {
    std::vector<cost::LayerSample> layers;
    std::vector<Rank> owners;
    cost::StepSample overhead;
    double forward_s = 0;  // of all layers

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("layers", self.layers);
      visit("owners", self.owners);
      visit("overhead", self.overhead);
      visit("forward_s", self.forward_s);
    }
  };
  // The times of a layer besides its forward pass, in units of that.
  struct Trained {
    double input_gradient = 0;
    double weight_gradient = 0;
    double update = 0;

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("input_gradient", self.input_gradient);
      visit("weight_gradient", self.weight_gradient);
      visit("update", self.update);
    }
  };

  // The share of each layer's products in force when the window was measured.
  struct Products {
    double time = 1;
    Bytes gradient_bytes;

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("time", self.time);
      visit("gradient_bytes", self.gradient_bytes);
    }
  };
  // All but what is known of the layers and the constructor's arguments.
  template <typename Self, typename Visit>
  static void fields(Self& self, Visit visit);
  [[nodiscard]] bool products_hold(const cost::ModelCost& known) const;
  [[nodiscard]] std::deque<Sample> predicted(const cost::ModelCost& known) const;
  void note_work(const std::vector<cost::LayerSample>& layers);
  void note_overhead();
  void note_trained(int frozen_layers);
  void fill_in(Sample& sample, int frozen_layers) const;
  [[nodiscard]] std::deque<LayerTimes> times(int frozen_layers) const;
  [[nodiscard]] std::optional<FoundChange> find(int frozen_layers);
  // To all but the newest `steps`.
  void scale(const std::vector<double>& factors, int steps, int frozen_layers);
  // Std of a median over the steps / that of one step's value, over the layers; one that was
  // found to have changed is known from the steps since.
  [[nodiscard]] double median_error(bool of_ranks) const;

  cost::ModelCost known_;
  bool measured_boundaries_ = false;
  std::size_t least_;
  double relevant_;
  std::deque<Sample> window_;
  bool outdated_ = false;           // the whole window
  std::vector<Products> products_;  // by layer
  std::vector<FoundChange> found_;  // lately; their steps grow
  cost::StepSample overhead_;
  int frozen_layers_ = 0;                // of the newest step
  std::map<std::size_t, Trained> last_;  // by layer that has trained and been frozen since
  NoiseMeter noise_;
  std::vector<double> work_;  // by layer, as counted in the newest step
};

// Mean over the micro-batches of each field: a step takes their sum, outliers included.
[[nodiscard]] cost::LayerTime mean_time(const std::vector<cost::LayerTime>& micro_batches);

}  // namespace dynmo::control
