// SPDX-License-Identifier: Apache-2.0
#pragma once

// The last steps of all ranks as one Perfetto trace, in the format the simulator writes too.

#include <cstdint>
#include <deque>
#include <filesystem>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/schedule/timeline.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// One step of one rank. `start_ns` is the steady clock, which ranks of one host share.
struct StepTrace {
  std::int64_t step = 0;
  std::int64_t start_ns = 0;
  std::vector<schedule::TimedAction> actions;
};

// Called by all ranks with the same steps; rank 0 writes the file.
[[nodiscard]] Expected<void> write_trace(transport::Transport& transport, transport::Tag tag,
                                         const std::deque<StepTrace>& mine,
                                         const std::filesystem::path& path);

}  // namespace dynmo::train
