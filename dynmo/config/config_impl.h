// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dynmo/config/config.h"

namespace dynmo::config {

// Returns the config with all values that follow from other keys, so that it is independent of
// defaults. Keys without effect have no values.
[[nodiscard]] Config resolved(Config config);

}  // namespace dynmo::config
