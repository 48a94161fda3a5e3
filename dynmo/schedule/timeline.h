// SPDX-License-Identifier: Apache-2.0
#pragma once

// The times at which the actions of one step ran. Engine and simulator write the same value, so one
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
      // Actions by rank, in order of start. Communication is there if its times are known.
      ranks;
};

}  // namespace dynmo::schedule
