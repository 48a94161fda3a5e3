// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dynmo/core/expected.h"
#include "dynmo/train/setup/resolved_run.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Checks that all ranks have the same settings. All ranks call it before they train together. Ranks
// that were started separately may have different commands. Then they would wait for each other, or
// train different models. The paths of data and run may differ by host. Returns kBadInput with the
// difference.
[[nodiscard]] Expected<void> check_same_settings(transport::Transport& transport,
                                                 const ResolvedRun& run);

}  // namespace dynmo::train
