// SPDX-License-Identifier: Apache-2.0
#pragma once

// Messages from ranks to the launcher that has started them, one datagram each, on a socket that
// all ranks inherit. Ranks say that more ranks are needed, and that they have met the others. They
// name the programs that must end with the run. The launcher answers if a process that it was asked
// for ends before it is a rank.

#include <sys/types.h>

#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::process {

// Environment variable with the socket of a rank. If it is empty or absent, there is none.
inline constexpr const char* kLauncherFd = "DYNMO_LAUNCHER_FD";

// Returns whether this process was started by a launcher that starts more ranks on request.
[[nodiscard]] bool has_launcher();
// Asks for `ranks` more ranks. Returns kBadInput if this process was not started by a launcher that
// starts more.
[[nodiscard]] Expected<void> ask_for_ranks(int ranks);
// Tells the launcher that this rank has met the others, and its number among them. A late process
// is a rank from then on: its failure is one of the run.
void tell_launcher_met(int number);
// Tells the launcher that this rank has started a program, with this id, in its own process group.
void tell_launcher_hook(pid_t pid);
// Returns the exit codes of requested processes that have ended before they were ranks, since the
// last call.
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
// Parses a message. Returns nullopt for any other text.
[[nodiscard]] std::optional<LaunchRequest> parse_launch_request(std::string_view text);
// Tells the requesting rank that a process has ended, on the launcher's end of the socket.
void tell_leader_ended(int fd, int exit_code);

}  // namespace dynmo::process
