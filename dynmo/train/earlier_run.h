// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keeps what an earlier run has left in a folder from being overwritten by another one, unless that
// is what the user asks for.

#include "dynmo/core/expected.h"
#include "dynmo/train/options.h"

namespace dynmo::train {

// kBadInput where run.directory, or the folder of a run that is compared, holds an earlier run that
// this one neither resumes nor may overwrite; the message names what is there. Called before the
// first file is written.
[[nodiscard]] Expected<void> check_folder_is_free(const TrainOptions& options);

// With options.overwrite: removes the files of an earlier run, and nothing else, from those
// folders. One process of a run does so, which holds the run's locks. Whether there was one.
[[nodiscard]] Expected<bool> remove_earlier_run(const TrainOptions& options);

}  // namespace dynmo::train
