// SPDX-License-Identifier: Apache-2.0
#pragma once

// The last steps of all ranks as one Perfetto trace, in the simulator's format.

#include <cstdint>
#include <deque>
#include <filesystem>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/schedule/schedule.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// The activities of a rank beside its schedule. The names are those of the trace.
enum class SpanKind { kProfile, kPlan, kMigrate, kValidation, kCheckpoint };

struct TraceSpan {
  SpanKind kind = SpanKind::kCheckpoint;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
};

// One step of one rank. `start_ns` is the steady clock, which ranks of one host share.
struct StepTrace {
  std::int64_t step = 0;
  std::int64_t start_ns = 0;
  std::vector<schedule::TimedAction> actions;  // compute and messages
  std::vector<TraceSpan> spans = {};           // before it and after it
};

// Returns the trace of a step that began at `begin_ns` (steady clock) with balancing.
[[nodiscard]] StepTrace step_trace(const runtime::StepReport& report, std::int64_t begin_ns);

// Writes the trace. All ranks call it with the same steps, and rank 0 writes the file. Each replica
// is a process called `name`, and its ranks are neighbours. A send is drawn until its receiver has
// the message, because that is the relevant time.
[[nodiscard]] Expected<void> write_trace(transport::Transport& transport, transport::Tag tag,
                                         const std::deque<StepTrace>& mine, int replicas,
                                         const std::string& name,
                                         const std::filesystem::path& path);

}  // namespace dynmo::train
