// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dynmo/config/config.h"

namespace dynmo::config {

// Returns the config with derived values filled in, and keys without effect reset to their
// defaults. So two configs of the same run become equal.
[[nodiscard]] Config resolved(Config config);

}  // namespace dynmo::config
