// SPDX-License-Identifier: Apache-2.0
#pragma once

// The files that a run writes when it has ended: its trace, and what its layers cost. They are
// about a run that is done: one that could not be written is a line for people.

#include <string>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/train/generation.h"
#include "dynmo/train/run_log.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Called by all ranks of the last group, whose logs are closed. Returns the lines.
[[nodiscard]] Expected<std::vector<std::string>> write_last_files(transport::Transport& group,
                                                                  const GroupRun& part,
                                                                  const RunLog& log,
                                                                  const config::Config& config);

}  // namespace dynmo::train
