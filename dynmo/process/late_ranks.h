// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks tell the launcher that has started them that more are needed, that they have met the
// others, and what they have started that is to end with the run. The launcher answers when a
// process that it was asked for ends before it is a rank. One datagram each, on a socket that all
// ranks have inherited.

#include <sys/types.h>

#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::process {

// Names the socket in the environment of a rank; empty or absent: there is none.
inline constexpr const char* kLauncherFd = "DYNMO_LAUNCHER_FD";

// Whether a launcher that starts more ranks when it is asked has started this process.
[[nodiscard]] bool has_launcher();
// A rank asks for so many more. kBadInput where no launcher that starts them has started it.
[[nodiscard]] Expected<void> ask_for_ranks(int ranks);
// A rank tells that it has met the others, and its number among them. One that came later is a rank
// from then on: its failure is one of the run.
void tell_launcher_met(int number);
// A rank tells that it has started a program, with this number, in a process group of its own.
void tell_launcher_hook(pid_t pid);
// The rank that has asked for others learns the exit codes of those that have ended before they
// were ranks, since the last call.
[[nodiscard]] std::vector<int> take_ended_ranks();

struct WantedRanks {
  int ranks = 0;
};
struct MetRank {
  pid_t pid = 0;
  int number = 0;
};
struct StartedHook {
  pid_t pid = 0;
};
using LaunchRequest = std::variant<WantedRanks, MetRank, StartedHook>;
// nullopt: it is none.
[[nodiscard]] std::optional<LaunchRequest> parse_launch_request(std::string_view text);
// The launcher tells of such an end, on its end of the socket.
void tell_leader_ended(int fd, int exit_code);

}  // namespace dynmo::process
