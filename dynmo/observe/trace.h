// SPDX-License-Identifier: Apache-2.0
#pragma once

// Timelines as a Chrome trace (the "JSON array in an object" form that Perfetto and
// chrome://tracing open): a process for each source, such as the engine and the simulator laid over
// one another, a track for each rank, a slice for each action, arrows where a value goes to another
// rank, a curve of each rank's memory where it is known.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/schedule/timeline.h"
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
  Nanoseconds duration{0};      // at least until the last action's end, which is taken if shorter
  std::vector<std::vector<sim::MemoryStep>> memory = {};  // by rank, since the start of the step
  std::vector<TracedSpan> spans = {};                     // on the ranks' tracks of the timeline
};

struct TraceProcess {
  std::string name;               // "measured", "simulated"
  std::vector<TracedStep> steps;  // drawn one after another
};

// Slices are named like `2F0` and carry stage and micro-batch. Communication, where the timeline
// has it, overlaps compute and gets a track of its own beside the rank's; an arrow then runs from
// the action that made the value over the send and its receive to the action that uses it (flow
// events s, t, t, f of one id). Times are microseconds.
[[nodiscard]] std::string trace_json(std::span<const TraceProcess> processes);

}  // namespace dynmo::observe
