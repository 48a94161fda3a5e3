// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "dynmo/core/expected.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Called by all ranks before they train together. Ranks that a launcher or a person started may
// have been given different commands: they would wait for each other, or train different models.
// Where data and run lie may differ by host. kBadInput naming what differs.
[[nodiscard]] Expected<void> check_same_settings(transport::Transport& transport,
                                                 const TrainOptions& options,
                                                 std::int64_t vocabulary);

}  // namespace dynmo::train
