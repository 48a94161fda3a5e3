// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks tell the launcher that has started them that more are needed, and that one which came later
// is a rank now. One datagram each, on a socket that they have inherited.

#include <sys/types.h>

#include <optional>
#include <string_view>
#include <variant>

#include "dynmo/core/expected.h"

namespace dynmo::process {

// Names the socket in the environment of a rank; empty or absent: there is none.
inline constexpr const char* kLauncherFd = "DYNMO_LAUNCHER_FD";

// A rank asks for so many more. kBadInput where no launcher that starts them has started it.
[[nodiscard]] Expected<void> ask_for_ranks(int ranks);
// A rank that came later tells that it has this number, and that its failure is one of the run.
void tell_launcher_joined(int number);

struct WantedRanks {
  int ranks = 0;
};
struct JoinedRank {
  pid_t pid = 0;
  int number = 0;
};
using LaunchRequest = std::variant<WantedRanks, JoinedRank>;
// nullopt: it is none.
[[nodiscard]] std::optional<LaunchRequest> parse_launch_request(std::string_view text);

}  // namespace dynmo::process
