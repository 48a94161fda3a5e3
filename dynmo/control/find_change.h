// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whether the newest steps are of other work than the ones before: a test of new against old that
// needs no announcement, and does not wait until a median has aged.
//
// A layer's time in a step, against its median share in the older steps, has three parts, taken
// apart by medians in the logarithm: of the step (over the ranks), of the rank in this step (over
// its layers), and the layer's own. So a machine that is slower is no change, and neither is a rank
// that is slower for a moment.
//   A layer has changed if its own part in the newest 3 steps lies on one side, beyond 5
//   stds. The work of a rank has changed if the sum of its layers, without the step's part,
//   does so in the newest 4: a burst of 3 steps is no change.
// Every one of the newest steps must show at least half of it, and it must come to a share of the
// mean rank's time that matters.

#include <deque>
#include <optional>
#include <vector>

#include "dynmo/core/ids.h"

namespace dynmo::control {

// One step.
struct LayerTimes {
  std::vector<double> seconds;  // by layer
  std::vector<Rank> owners;     // by layer
};

// Standard deviations of one step's value, relative, as changes from one step to the next give
// them.
struct StepNoise {
  double own = 0;   // of a layer
  double rank = 0;  // of the sum of a rank's layers
};

struct FoundChange {
  // The layer whose work differs most or, where no single layer does, the rank; and the factor.
  std::optional<LayerId> layer;
  std::optional<Rank> rank;
  double factor = 1;
  // For each layer, the factor that takes a time of an older step to the new work; 1 where nothing
  // was found.
  std::vector<double> factors;
  int steps = 0;  // newest ones, which are of the new work

  // For state_json_impl.h, in which order does not matter.
  template <typename Self, typename Visit>
  static void fields(Self& self, Visit visit) {
    visit("layer", self.layer);
    visit("rank", self.rank);
    visit("factor", self.factor);
    visit("factors", self.factors);
    visit("steps", self.steps);
  }
};

// `steps` from old to new, each of the same layers; nullopt below 6 of them. The std is the
// larger one of `noise` and of what the older steps scatter around their median. `relevant`: least
// change as a share of the mean rank's time.
[[nodiscard]] std::optional<FoundChange> find_change(const std::deque<LayerTimes>& steps,
                                                     const StepNoise& noise, double relevant);

// The factors of a change that was found, measured again when its `found.steps` are more: those of
// the layers that have one. Requires more steps than these.
[[nodiscard]] std::vector<double> measure_change(const std::deque<LayerTimes>& steps,
                                                 const FoundChange& found);

}  // namespace dynmo::control
