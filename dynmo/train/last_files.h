// SPDX-License-Identifier: Apache-2.0
#pragma once

// The files that a run writes at its end: its trace, and the costs of its layers. The run is done
// by then. So a file that cannot be written is a line for the user, not an error.

#include <span>
#include <string>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/train/generation.h"
#include "dynmo/train/run_log.h"
#include "dynmo/train/traces.h"
#include "dynmo/transport/clocks.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

struct LastFiles {
  std::vector<std::string> lines;           // for the user
  std::vector<observe::TraceClock> clocks;  // on rank 0, if the trace is of several clocks
};

// Writes the files. All ranks of the last group call it after closing their logs. `clocks` are
// those of the ranks.
[[nodiscard]] Expected<LastFiles> write_last_files(transport::Transport& group,
                                                   const GroupRun& part, const RunLog& log,
                                                   const config::Config& config,
                                                   std::span<const transport::ClockFit> clocks);

}  // namespace dynmo::train
