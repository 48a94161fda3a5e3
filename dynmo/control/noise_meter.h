// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures by how much the times of layers and ranks differ from one step to the next under the
// same plan. A slowdown common to all ranks is no noise: it moves no decision.

#include <cstddef>
#include <deque>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/cost/layer_sample.h"

namespace dynmo::control {

class NoiseMeter {
 public:
  // It looks back at the newest `longest` steps.
  explicit NoiseMeter(std::size_t longest) : longest_(longest) {}

  // The next step, with the ranks of its layers.
  void add(const std::vector<cost::LayerSample>& layers, const std::vector<Rank>& owners);
  // Each layer's work is so many times that of the newest step: a count that changes is no noise.
  void scale(const std::vector<double>& factors);
  // How much the counted work of a layer differs from that of the step before: relative, mean over
  // the layers that have one.
  void add_work_change(double change);

  // Standard deviation of one step's value, relative: of a layer, in what it has of its own, mean
  // over the layers; of what the layers of a rank have in common; of a layer's counted work.
  [[nodiscard]] double own() const { return own_deviation_; }
  [[nodiscard]] double rank() const { return rank_deviation_; }
  [[nodiscard]] double work() const;

  // The ranks of the newest step's layers.
  [[nodiscard]] const std::vector<Rank>& owners() const { return owners_; }
  [[nodiscard]] std::vector<Rank>& owners() { return owners_; }
  [[nodiscard]] bool fits(std::size_t layers) const;

  // All but the constructor's argument.
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
  // The newest step, to compare the next one with.
  std::vector<Rank> owners_;
  std::vector<double> own_shares_;   // of each layer in its rank's forward time
  std::vector<double> rank_levels_;  // logarithms of the ranks' sums, mean 0
  // Absolute differences of one step to the next.
  std::deque<std::vector<double>> own_changes_;  // by layer
  std::deque<double> rank_changes_;
  std::deque<double> work_changes_;
  double own_deviation_ = 0;
  double rank_deviation_ = 0;
};

}  // namespace dynmo::control
