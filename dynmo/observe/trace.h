// SPDX-License-Identifier: Apache-2.0
#pragma once

// Timelines as a Chrome trace, in the "JSON array in an object" form that Perfetto and
// chrome://tracing open. A source, such as engine or simulator, is a process, and processes
// overlay. A rank is a track, and an action a slice. Arrows show values that go to another rank,
// and a curve shows each rank's memory if known.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/schedule/schedule.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::observe {

// A traced span is an activity of a rank outside the actions of a step: "migrate", "validation",
// "checkpoint".
struct TracedSpan {
  std::size_t rank = 0;
  std::string name;
  Nanoseconds start{0};  // since the start of the step
  Nanoseconds end{0};
};

struct TracedStep {
  std::int64_t step = 0;
  schedule::Timeline timeline;  // since the start of the step
  Nanoseconds duration{0};      // raised to the last action's end if shorter
  std::vector<std::vector<sim::MemoryStep>> memory = {};  // by rank, since the start of the step
  std::vector<TracedSpan> spans = {};                     // on the ranks' tracks of the timeline
};

struct TraceProcess {
  std::string name;               // "measured", "simulated"
  std::vector<TracedStep> steps;  // drawn one after another
};

// The difference between the clocks of a rank and of rank 0. The times of a trace are those of rank
// 0's clock.
struct TraceClock {
  double offset_s = 0;  // clock of the rank minus clock of rank 0, at the end
  double error_s = 0;   // bound on the error of all times of the rank
};

// Returns {"error_s": the largest, "ranks": [{"offset_s", "error_s"}, ...]}.
[[nodiscard]] Json clocks_json(std::span<const TraceClock> clocks);

// Returns the trace. Slices are named like `2F0` and have stage and micro-batch. Communication
// overlaps compute, so it is on tracks of its own beside the rank's. An arrow runs from the action
// that made a value, by its send and receive, to the action that uses it (flow events s, t, t, f of
// one id). Times are microseconds. `clocks` are written to "otherData". They are empty if all ranks
// have one clock.
[[nodiscard]] std::string trace_json(std::span<const TraceProcess> processes,
                                     std::span<const TraceClock> clocks = {});

}  // namespace dynmo::observe
