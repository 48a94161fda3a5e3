// SPDX-License-Identifier: Apache-2.0
#pragma once

// The files that a run writes at its end: its trace, and the costs of its layers. The run is done
// by then. So a file that cannot be written is a line for the user, not an error.

#include <string>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/train/generation.h"
#include "dynmo/train/run_log.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Writes the files. All ranks of the last group call it after closing their logs. Returns the lines
// for the user.
[[nodiscard]] Expected<std::vector<std::string>> write_last_files(transport::Transport& group,
                                                                  const GroupRun& part,
                                                                  const RunLog& log,
                                                                  const config::Config& config);

}  // namespace dynmo::train
