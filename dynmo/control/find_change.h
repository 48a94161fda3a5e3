// SPDX-License-Identifier: Apache-2.0
#pragma once

// Detects that the newest steps have other work than the ones before. This test of new against old
// needs no announcement, and does not wait for a median.
//
// A layer's time in a step, relative to its median share in the older steps, has three parts. One
// is common to all ranks in the step, one to the layers of a rank in the step, and one is the
// layer's own. Medians of the logarithm separate them. So a slower machine is no change, and
// neither is a rank that is slower for a moment.
//
// A layer has changed if its own part differs by more than 5 stds, to one side, in the newest 3
// steps. The work of a rank has changed if the sum of its layers, without the step's part, does so
// in the newest 4. So a burst of 3 steps is no change. Each of the newest steps must show at least
// half of the change. The change must also be a relevant share of the mean rank's time.

#include <deque>
#include <optional>
#include <vector>

#include "dynmo/core/ids.h"

namespace dynmo::control {

struct LayerTimes {
  std::vector<double> seconds;  // by layer
  std::vector<Rank> owners;     // by layer
};

// Relative standard deviations of one step's value, from the changes between consecutive steps.
struct StepNoise {
  double own = 0;   // of a layer
  double rank = 0;  // of the sum of a rank's layers
};

struct FoundChange {
  // The layer whose work differs most, or the rank if no single layer does, and the factor.
  std::optional<LayerId> layer;
  std::optional<Rank> rank;
  double factor = 1;
  // For each layer, its time now / its time in an older step. 1: no change.
  std::vector<double> factors;
  int steps = 0;  // number of newest steps with the new work

  template <typename Self, typename Visit>
  static void fields(Self& self, Visit visit) {
    visit("layer", self.layer);
    visit("rank", self.rank);
    visit("factor", self.factor);
    visit("factors", self.factors);
    visit("steps", self.steps);
  }
};

// Finds a change in `steps`, from old to new, with the same layers. Returns nullopt if there is
// none or there are fewer than 6 steps. The std is the larger one of `noise` and the spread of the
// older steps around their median. `relevant` is the minimum change as a share of the mean rank's
// time.
[[nodiscard]] std::optional<FoundChange> find_change(const std::deque<LayerTimes>& steps,
                                                     const StepNoise& noise, double relevant);

// Returns the factors of a found change, measured again after further steps. Layers without a
// change keep factor 1. Requires more steps than `found.steps`.
[[nodiscard]] std::vector<double> measure_change(const std::deque<LayerTimes>& steps,
                                                 const FoundChange& found);

}  // namespace dynmo::control
