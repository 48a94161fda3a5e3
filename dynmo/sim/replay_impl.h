// SPDX-License-Identifier: Apache-2.0
#pragma once

// The replay itself: computes when each rank is done, by the rules of docs/simulator.md.

#include <cstdint>
#include <vector>

#include "dynmo/schedule/schedule.h"
#include "dynmo/sim/simulate.h"
#include "dynmo/sim/step_costs_impl.h"

namespace dynmo::sim {

struct RankReplay {
  std::int64_t end = 0;  // last action done, last send arrived, last reduction done
  // The same if messages and reductions were free and immediate.
  std::int64_t free_end = 0;
  std::int64_t busy = 0;  // without the update
  std::int64_t peak_stash = 0;
};

struct ReplayResult {
  // Set if ranks wait for each other. Then all other fields mean nothing.
  bool is_stuck = false;
  std::vector<RankReplay> ranks;
  schedule::Timeline timeline;  // if requested
  std::vector<std::vector<MemoryStep>> memory;
};

// Replays a step. Requires a schedule that keeps rules 1 to 4 of schedule/check.h, and its costs.
[[nodiscard]] ReplayResult replay(const schedule::Schedule& schedule, const StepCosts& costs,
                                  const SimOptions& options);

}  // namespace dynmo::sim
