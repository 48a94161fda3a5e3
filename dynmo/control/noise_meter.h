// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures the change of times of layers and ranks between consecutive steps under the same plan. A
// slowdown of all ranks is not noise: it affects no decision.

#include <cstddef>
#include <deque>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/cost/layer_sample.h"

namespace dynmo::control {

class NoiseMeter {
 public:
  // Uses the newest `longest` steps.
  explicit NoiseMeter(std::size_t longest) : longest_(longest) {}

  // Adds the next step. `owners` are the ranks of its layers.
  void add(const std::vector<cost::LayerSample>& layers, const std::vector<Rank>& owners);
  // Multiplies the stored shares by `factors`, by layer, because a known change of work is not
  // noise.
  void scale(const std::vector<double>& factors);
  // Adds the relative difference of counted work between two steps, mean over the layers with a
  // count.
  void add_work_change(double change);

  // Returns the relative standard deviation of one step's value. For own() it is that of a layer's
  // own part, mean over the layers. For rank() it is that of the common part of a rank's layers.
  // For work() it is that of a layer's counted work.
  [[nodiscard]] double own() const { return own_deviation_; }
  [[nodiscard]] double rank() const { return rank_deviation_; }
  [[nodiscard]] double work() const;

  // Returns the ranks of the newest step's layers.
  [[nodiscard]] const std::vector<Rank>& owners() const { return owners_; }
  [[nodiscard]] std::vector<Rank>& owners() { return owners_; }
  [[nodiscard]] bool fits(std::size_t layers) const;

  // Calls visit(name, member) for all members except the constructor's argument.
  template <typename Self, typename Visit>
  static void fields(Self& self, Visit visit) {
    visit("owners", self.owners_);
    visit("own_shares", self.own_shares_);
    visit("rank_levels", self.rank_levels_);
    visit("own_changes", self.own_changes_);
    visit("rank_changes", self.rank_changes_);
    visit("work_changes", self.work_changes_);
    visit("own_deviation", self.own_deviation_);
    visit("rank_deviation", self.rank_deviation_);
  }

 private:
  std::size_t longest_;
  // The newest step, to compare with the next one.
  std::vector<Rank> owners_;
  std::vector<double> own_shares_;   // of each layer in its rank's forward time
  std::vector<double> rank_levels_;  // logarithms of the ranks' sums, mean 0
  // Absolute differences between consecutive steps.
  std::deque<std::vector<double>> own_changes_;  // by layer
  std::deque<double> rank_changes_;
  std::deque<double> work_changes_;
  double own_deviation_ = 0;
  double rank_deviation_ = 0;
};

}  // namespace dynmo::control
