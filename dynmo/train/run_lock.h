// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keeps two runs out of one folder, where each would destroy the other's checkpoints and records.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/process/file_lock.h"
#include "dynmo/train/options.h"

namespace dynmo::train {

// Set in the environment of the ranks of a launcher, which holds the locks of their run.
inline constexpr const char* kLockedByLauncher = "DYNMO_RUN_LOCKED";

// Held as long as the run.
using RunLocks = std::vector<process::FileLock>;

// Makes the run's folder, and that of each run it compares, and locks them. One process of a run
// does so: the launcher, or rank 0 where somebody else has started the ranks. kBadInput: another
// run holds one; it says which.
[[nodiscard]] Expected<RunLocks> lock_run(const TrainOptions& options);

}  // namespace dynmo::train
