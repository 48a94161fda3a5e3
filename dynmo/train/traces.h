// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes the last steps of all ranks as one Perfetto trace, in the simulator's format, by the clock
// of rank 0. Also makes a step's entry in the load trace.

#include <cstdint>
#include <deque>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/observe/load_trace_writer.h"
#include "dynmo/observe/trace.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/runtime/step_report.h"
#include "dynmo/schedule/schedule.h"
#include "dynmo/transport/clocks.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// The activities of a rank beside its schedule. The names are those of the trace.
enum class SpanKind { kProfile, kPlan, kMigrate, kValidation, kCheckpoint };

struct TraceSpan {
  SpanKind kind = SpanKind::kCheckpoint;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
};

// One step of one rank. `start_ns` is a time of the rank's steady clock.
struct StepTrace {
  std::int64_t step = 0;
  std::int64_t start_ns = 0;
  std::vector<schedule::TimedAction> actions;  // compute and messages
  std::vector<TraceSpan> spans = {};           // before it and after it
};

// Returns the trace of a step. Its first span, the measuring or planning before it, began at
// `begin_ns` (steady clock).
[[nodiscard]] StepTrace step_trace(const runtime::StepReport& report, std::int64_t begin_ns);

// The traces of all ranks on one clock.
struct JointTrace {
  std::vector<std::vector<StepTrace>> ranks;  // empty: nothing was traced, or this is not rank 0
  std::vector<observe::TraceClock> clocks;    // by rank; empty: all have one clock
};

// Gathers the traces at rank 0. All ranks call it with the same steps. `clocks` are those of the
// ranks. Times of a shared clock stay as they are. Fails with kPeerLost.
[[nodiscard]] Expected<JointTrace> gather_traces(transport::Transport& transport,
                                                 transport::Tag tag,
                                                 const std::deque<StepTrace>& mine,
                                                 std::span<const transport::ClockFit> clocks);

// Writes the trace. Each replica is a process called `name`, and its ranks are neighbours. A send
// is drawn until its receiver has the message, because that is the relevant time.
[[nodiscard]] Expected<void> write_trace(const JointTrace& trace, int replicas,
                                         const std::string& name,
                                         const std::filesystem::path& path);

// Returns the data for the load trace of a step that the pipeline has just done.
[[nodiscard]] observe::LoadTraceWriter::Step load_trace_step(const runtime::StepReport& report,
                                                             const runtime::Pipeline& pipeline);

}  // namespace dynmo::train
