// SPDX-License-Identifier: Apache-2.0
#pragma once

// The environment variables by which the launcher passes values to the ranks that it starts.

#include <string>
#include <utility>
#include <vector>

#include "dynmo/process/launcher.h"
#include "dynmo/process/sockets.h"

namespace dynmo::process {

using Variables = std::vector<std::pair<std::string, std::string>>;

// Returns NAME=VALUE of all variables of a rank: this process's, overridden by those of `options`
// and `place`. `requests` is the socket for late_ranks.h, or -1.
[[nodiscard]] std::vector<std::string> environment_of(const LaunchOptions& options, int requests,
                                                      const Variables& place);
// Returns the variables of one of the first ranks. `store` is rank 0's listening socket.
[[nodiscard]] Variables place_of(const LaunchOptions& options, int rank, const UniqueFd& store);
// Returns the variables of a rank that comes later.
[[nodiscard]] Variables no_place();

}  // namespace dynmo::process
