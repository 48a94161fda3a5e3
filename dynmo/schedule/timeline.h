// SPDX-License-Identifier: Apache-2.0
#pragma once

// A timeline says what ran when in one step. Engine and simulator write the same value, so that one
// can be laid over the other.

#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

struct TimedAction {
  Action action;
  Nanoseconds start{0};  // since the start of the step
  Nanoseconds end{0};
};

struct Timeline {
  std::vector<std::vector<TimedAction>>
      ranks;  // by rank, in order of start; compute, and communication where known
};

}  // namespace dynmo::schedule
