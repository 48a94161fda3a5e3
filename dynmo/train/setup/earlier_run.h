// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ownership of a run's folder. Its lock excludes a second run. The files of an earlier run are not
// overwritten unless the user asks for it. An interrupted run is found.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/process/file_lock.h"
#include "dynmo/train/setup/options.h"

namespace dynmo::train {

// Checks that run.directory and the folders of compared runs have no earlier run, unless this run
// resumes it or may overwrite it. Also checks that this run replaces no file of another kind.
// Returns kBadInput with the existing files. Call it before writing the first file.
[[nodiscard]] Expected<void> check_folder_is_free(const TrainOptions& options);

// Removes the files of an earlier run, and nothing else, from the folders of
// check_folder_is_free(), if options.overwrite is set. One process of a run calls it, which holds
// the run's locks. Returns whether an earlier run was there, or kBadInput if a file cannot be
// removed.
[[nodiscard]] Expected<bool> remove_earlier_run(const TrainOptions& options);

// Environment variable of ranks whose launcher holds the locks of the run.
inline constexpr const char* kLockedByLauncher = "DYNMO_RUN_LOCKED";

// The locks of a run, held until it ends.
using RunLocks = std::vector<process::FileLock>;

// Creates and locks the run's folder, and that of each run that it compares. One process of a run
// calls it: the launcher, or rank 0 if another program has started the ranks. Returns kBadInput
// with the run that holds a lock.
[[nodiscard]] Expected<RunLocks> lock_run(const TrainOptions& options);

// The state of an interrupted run, to continue it.
struct Interruption {
  std::optional<std::int64_t> steps_done = {};       // nullopt: no step recorded since `begin`
  std::optional<std::int64_t> checkpoint_step = {};  // nullopt: there is no checkpoint
  std::filesystem::path config;                      // resolved config of the run
};

// Examines the run that began at `begin` and whose processes have ended.
[[nodiscard]] Interruption find_interruption(const TrainOptions& options,
                                             std::filesystem::file_time_type begin);

}  // namespace dynmo::train
