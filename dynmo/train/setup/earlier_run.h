// SPDX-License-Identifier: Apache-2.0
#pragma once

// Who has a run's folder: its lock keeps two runs out of it; what an earlier run has left there is
// not overwritten by another, unless the user asks for that; and an interrupted one is found.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/process/file_lock.h"
#include "dynmo/train/setup/options.h"

namespace dynmo::train {

// kBadInput where run.directory, or the folder of a run that is compared, holds an earlier run that
// this one neither resumes nor may overwrite, or a file of no run that this one would replace; the
// message names what is there. Called before the first file is written.
[[nodiscard]] Expected<void> check_folder_is_free(const TrainOptions& options);

// With options.overwrite: removes the files of an earlier run, and nothing else, from those
// folders. One process of a run does so, which holds the run's locks. Whether there was one.
[[nodiscard]] Expected<bool> remove_earlier_run(const TrainOptions& options);

// Set in the environment of the ranks of a launcher, which holds the locks of their run.
inline constexpr const char* kLockedByLauncher = "DYNMO_RUN_LOCKED";

// Held as long as the run.
using RunLocks = std::vector<process::FileLock>;

// Makes the run's folder, and that of each run it compares, and locks them. One process of a run
// does so: the launcher, or rank 0 where somebody else has started the ranks. kBadInput: another
// run holds one; it says which.
[[nodiscard]] Expected<RunLocks> lock_run(const TrainOptions& options);

// The state that an interrupted run has left, for whoever wants to continue it.
struct Interruption {
  std::optional<std::int64_t> steps_done = {};       // nullopt: no step was recorded since `begin`
  std::optional<std::int64_t> checkpoint_step = {};  // nullopt: there is no checkpoint
  std::filesystem::path config;                      // of the run, as it was resolved
};

// Looks at the run that began at `begin` and whose processes have ended.
[[nodiscard]] Interruption find_interruption(const TrainOptions& options,
                                             std::filesystem::file_time_type begin);

}  // namespace dynmo::train
