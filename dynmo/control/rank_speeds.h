// SPDX-License-Identifier: Apache-2.0
#pragma once

// Separates slow ranks from expensive layers: a hot or shared core, a failing card. The time of a
// layer is its work x the factor of its rank. The controller gives the profiler times at full
// speed, and plans for ranks of these speeds. So the layers of a slow rank do not look expensive on
// it, and cheap on another rank.
//
// A rank has become slow if all its layers take longer by one factor, in each of the newest 4
// steps, than in older ones. This must hold for forward passes and for weight gradients, and for
// times per unit of counted work and in total. Times are relative to the other ranks, and the
// factor must exceed the noise. Sources change layers in other ways: by their own factors,
// announced or counted, or on several ranks. The same test finds that a slow rank has become
// faster. A factor is never below 1: a faster rank has less work.
//
// Moved layers are the second evidence, after 3 steps on their new rank. If all layers that have
// left a rank become faster by one factor, the rank was slow before. If those that have left a slow
// rank take the same time elsewhere, their work has grown, and the rank is not slow. If those that
// have come to a slow rank take the same time as before, it is fast again.

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_sample.h"

namespace dynmo::control {

struct SpeedChange {
  Rank rank;
  double before = 1;         // time of a layer / its time at full speed
  double factor = 1;         // the ratio from now on
  std::int64_t steps = 0;    // since the change, the newest step included
  std::int64_t samples = 0;  // observations since the change

  template <typename Self, typename Visit>
  static void fields(Self& self, Visit visit) {
    visit("rank", self.rank);
    visit("before", self.before);
    visit("factor", self.factor);
    visit("steps", self.steps);
    visit("samples", self.samples);
  }
};

// Finds slow ranks, and how slow they are. Deterministic. One thread uses it. Without a slow rank,
// at_full_speed() and slowed() return their arguments unchanged, bit for bit.
class RankSpeeds {
 public:
  // Adds an observation, which stands for `steps` steps. `layers` are by LayerId, and `owners`
  // their ranks. Returns the ranks whose factors have changed.
  const std::vector<SpeedChange>& add(const std::vector<cost::LayerSample>& layers,
                                      const std::vector<Rank>& owners, std::int64_t steps = 1);
  // Returns what the newest add() has returned.
  [[nodiscard]] const std::vector<SpeedChange>& changes() const { return changes_; }

  // Forgets the times of layers without a count, because their work changes from the next step on.
  void restart();
  // Forgets all times. The factors stay.
  void forget_times();
  // Multiplies the times of all steps except the newest `steps` by `factors`, by layer, because the
  // work has changed since.
  void scale(const std::vector<double>& factors, int steps);

  // Returns the times that the layers would have taken at full speed.
  [[nodiscard]] std::vector<cost::LayerSample> at_full_speed(std::vector<cost::LayerSample> layers,
                                                             const std::vector<Rank>& owners) const;
  // Returns `ranks` with the speeds of slow ranks divided by their factors.
  [[nodiscard]] cost::Cluster slowed(cost::Cluster ranks) const;

  // Renumbers the ranks after some have joined or left. Rank i was `before[i]`, or is new.
  void ranks_changed(const std::vector<std::optional<Rank>>& before);

  // One observed step, at full speed. A value is 0 if it was not measured or not counted.
  struct Step {
    std::vector<double> forward_s;  // here and below by layer
    std::vector<double> weight_gradient_s;
    std::vector<double> work;
    std::vector<Rank> owners;
    std::int64_t steps = 1;

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("forward_s", self.forward_s);
      visit("weight_gradient_s", self.weight_gradient_s);
      visit("work", self.work);
      visit("owners", self.owners);
      visit("steps", self.steps);
    }
  };
  template <typename Self, typename Visit>
  static void fields(Self& self, Visit visit) {
    visit("window", self.window_);
    visit("factors", self.factors_);
  }
  // Returns whether a restored state has `layers` layers.
  [[nodiscard]] bool fits(std::size_t layers) const;

 private:
  [[nodiscard]] double factor(Rank rank) const;
  void find_new_speeds();
  void learn_from_moves();
  void set(Rank rank, double factor, std::size_t samples);

  std::deque<Step> window_;
  std::map<Rank, double> factors_;  // of slow ranks
  std::vector<SpeedChange> changes_;
};

}  // namespace dynmo::control
