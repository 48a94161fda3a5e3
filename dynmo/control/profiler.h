// SPDX-License-Identifier: Apache-2.0
#pragma once

// Converts the layer times of the last steps into costs, and detects changes. It measures every
// layer in every step (two clock reads a layer, 0.004 % of a step). So there is no separate
// profiling phase. It also measures a step's overhead outside the layers.
//
// Each time is stored as its share of the step's forward time. The estimate is the median share
// over a window. While nothing changes, the window grows up to 8 times its minimum length. The
// duration of a step is the median over the newest three alone. So a machine that is slower for a
// while changes no share.
//
// If the work of the newest steps differs (find_change.h), the older ones are scaled to it. So the
// window stays long, and a change of one layer does not make others uncertain.
//
// After weights were pruned, earlier costs are scaled to the kept weights (LayerCost::product_time)
// until the next step has measured them.
//
// If sources count the work of layers (LayerSample::work), the estimate is the time of a unit of
// work. The older steps of the window are scaled to the work of the newest one. So a changed count
// needs no new measurement.
//
// A frozen layer has no backward pass to measure. It keeps the last measured one, so that its costs
// are known when it trains again.

#include <cstddef>
#include <cstdint>
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
  // Begins without measurements. `known` has names and bytes of every layer, and its times are not
  // used. `window` is the minimum length, in steps. `relevant` is the minimum of a change as a
  // share of the mean rank's time.
  Profiler(cost::ModelCost known, int window, double relevant = 0.01);

  // Adds a step. Layers are by LayerId, and `owners` are their ranks. The first `frozen_layers` ran
  // forward only. Returns a change if the newest steps have other work than the older ones.
  std::optional<FoundChange> add(const std::vector<cost::LayerSample>& layers,
                                 const std::vector<Rank>& owners, const cost::StepSample& step = {},
                                 int frozen_layers = 0);
  // Notes that the work of the layers changes with the next step. The window starts again with that
  // step. The noise of the machine is kept.
  void restart() { outdated_ = true; }
  // Multiplies the times of the rank's layers in the newest `steps` steps, because its speed
  // differed from the known one.
  void scale(Rank rank, double factor, std::int64_t steps);
  void forget_times();  // and noise; keeps known bytes
  // Returns names and bytes of the layers, with metered stashes.
  [[nodiscard]] const cost::ModelCost& known() const { return known_; }
  // Replaces names and bytes, except for measured bytes of stashes and boundaries. If `known` has
  // other product times, the window starts again with the next step.
  void know(cost::ModelCost known);
  // Returns known() with the first layers frozen.
  [[nodiscard]] cost::ModelCost known(int frozen_layers) const;
  // Returns the observations of the window, as measured or scaled.
  [[nodiscard]] std::vector<cost::Observation> observations() const;
  [[nodiscard]] int steps() const { return static_cast<int>(window_.size()); }  // in the window

  // Returns `known` with the measured times, or nullopt before the first step. `known` says which
  // layers are frozen, and has all sizes and product times. Times of passes that its frozen layers
  // do not run are 0. So freezing and unfreezing need no new measurement.
  [[nodiscard]] std::optional<cost::ModelCost> costs(cost::ModelCost known) const;
  [[nodiscard]] std::optional<cost::ModelCost> costs(int frozen_layers) const {
    return costs(known(frozen_layers));
  }
  // Returns the overhead of a step. Each field is the median over the newest steps that measured
  // it, at most the minimum window. If none did, it is the last known value.
  [[nodiscard]] const cost::StepSample& overhead() const { return overhead_; }
  // Returns the relative standard deviation of a layer's own part of its cost in costs(), mean over
  // the layers. It is derived from the change of the layer's share of its rank's forward time
  // between consecutive steps under the same plan. A slowdown of all layers does not count.
  [[nodiscard]] double relative_noise() const;
  // Like relative_noise(), for the common part of a rank's layers, which other load on its
  // processor changes. It is derived from the change of the ranks' sums, and is 0 for one rank.
  [[nodiscard]] double rank_noise() const;
  // Returns the newest counted work of each layer, 0 if not counted. Returns none before the first
  // step.
  [[nodiscard]] const std::vector<double>& work() const { return work_; }
  // Returns the relative standard deviation of the change of a layer's counted work between
  // consecutive steps. It is the mean over the layers that have a count.
  [[nodiscard]] double work_noise() const { return noise_.work(); }

  // Renumbers the ranks after some have joined or left. Rank i was `before[i]`, or is new.
  void ranks_changed(const std::vector<std::optional<Rank>>& before);
  // Returns the state from which restore() makes an equal profiler, with equal arguments.
  [[nodiscard]] Json state() const;
  // Restores a state(). Returns kInternal for any other JSON. Then this object must not be used.
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
  // The other times of a layer, relative to its forward pass.
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

  // The products of each layer when the window was measured (LayerCost::product_time).
  struct Products {
    double time = 1;
    Bytes gradient_bytes;

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("time", self.time);
      visit("gradient_bytes", self.gradient_bytes);
    }
  };
  struct Minimum {
    std::size_t steps = 1;  // of the window
    double change = 0;      // as a share of the mean rank's time
  };
  // Calls visit(name, member) for all members except the constructor's arguments and what is known
  // of the layers.
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
  // Scales all steps except the newest `steps`.
  void scale(const std::vector<double>& factors, int steps, int frozen_layers);
  // Returns the std of a median over the window, divided by that of one step's value: root mean
  // square over the layers. For a layer with a found change, only the steps since then count.
  [[nodiscard]] double median_error(bool of_ranks) const;

  cost::ModelCost known_;
  bool measured_boundaries_ = false;
  Minimum minimum_;
  std::deque<Sample> window_;
  bool outdated_ = false;           // the whole window
  std::vector<Products> products_;  // by layer
  std::vector<FoundChange> found_;  // recent ones, whose steps still grow
  cost::StepSample overhead_;
  int frozen_layers_ = 0;                // of the newest step
  std::map<std::size_t, Trained> last_;  // by layer that has trained and been frozen since
  NoiseMeter noise_;
  std::vector<double> work_;  // by layer, as counted in the newest step
};

// Returns the mean over the micro-batches of each field. A step takes their sum, so outliers are
// included.
[[nodiscard]] cost::LayerTime mean_time(const std::vector<cost::LayerTime>& micro_batches);

}  // namespace dynmo::control
