// SPDX-License-Identifier: Apache-2.0
#pragma once

// The launcher passes these values to the ranks that it starts, as variables of their environment.

#include <string>
#include <utility>
#include <vector>

#include "dynmo/process/launcher.h"
#include "dynmo/process/sockets.h"

namespace dynmo::process {

using Variables = std::vector<std::pair<std::string, std::string>>;

// NAME=VALUE of all variables of a rank: this process's, with those of `options` and `place` over
// them. `requests`: where ranks say what they want (late_ranks.h), -1: nowhere.
[[nodiscard]] std::vector<std::string> environment_of(const LaunchOptions& options, int requests,
                                                      const Variables& place);
// Returns the variables of one of the first ranks; `store` is where rank 0 listens.
[[nodiscard]] Variables place_of(const LaunchOptions& options, int rank, const UniqueFd& store);
// Returns the variables of a rank that comes later.
[[nodiscard]] Variables no_place();

}  // namespace dynmo::process
