// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a run that was interrupted has left in its folder, for whoever wants to continue it.

#include <cstdint>
#include <filesystem>
#include <optional>

#include "dynmo/train/options.h"

namespace dynmo::train {

struct Interruption {
  std::optional<std::int64_t> steps_done = {};       // nullopt: no step was recorded since `begin`
  std::optional<std::int64_t> checkpoint_step = {};  // nullopt: there is no checkpoint
  std::filesystem::path config;                      // of the run, as it was resolved
};

// Of the run that began at `begin` and whose processes have ended.
[[nodiscard]] Interruption find_interruption(const TrainOptions& options,
                                             std::filesystem::file_time_type begin);

}  // namespace dynmo::train
