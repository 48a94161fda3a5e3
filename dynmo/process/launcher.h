// SPDX-License-Identifier: Apache-2.0
#pragma once

// Starts the ranks of a run as processes of this host, shows what they say, and sees to it that
// they end together. What `dynmo train` does where nobody else (torchrun, srun) has started the
// ranks.
//
// Each rank finds in its environment RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
// from torchrun, and one thread for OpenMP and MKL unless the user set another number. The port
// cannot be taken by another program meanwhile: the launcher listens on it from the start and hands
// the socket to rank 0 (DYNMO_STORE_FD, read by rank_environment.h). Knows nothing of libtorch.

#include <unistd.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::process {

struct LaunchOptions {
  int ranks = 1;
  std::vector<std::string> command;  // program and arguments; looked up in PATH if without '/'
  std::vector<std::pair<std::string, std::string>> environment = {};  // added to this process's
  std::string address = "127.0.0.1";  // of this host, where the ranks meet
  std::vector<int> cores = {};        // rank i is pinned to cores[i % size]; empty: nowhere
  // The command of a rank that comes when a rank asks for it (ask_for_ranks); empty: none does. It
  // finds nothing of a place in its environment.
  std::vector<std::string> late_command = {};
  // Once a rank has said that they have met, the others go on where one is killed by a signal, ends
  // with 1, a defect, or with 5, as it has hung or was left out: they end by themselves where they
  // cannot. The exit code is then that of those that end last.
  bool survives = false;
  bool all_report = false;     // the output below is that of all ranks, as any may come to speak
  int output = STDOUT_FILENO;  // becomes rank 0's own stdout
  int errors = STDERR_FILENO;  // what else the ranks print, in whole lines, "[rank 2] " in front
  std::chrono::milliseconds grace{4000};             // for the others to end after a failure
  std::chrono::milliseconds interrupt_grace{10000};  // for all to end after Ctrl-C
  // After SIGTERM or SIGUSR1: to finish a step and to write a checkpoint.
  std::chrono::milliseconds stop_grace{600000};
};

// Starts the ranks and returns when none of their processes is left: 0 if all ended with 0, else
// the exit code of the run. 5 where a rank was killed by a signal; else that of the first rank that
// failed on its own account (5 is one that lost another); 130 after SIGINT, SIGTERM, SIGUSR1 or
// SIGHUP to this process, which the ranks get, too. After a failure the others have `grace` to end
// by themselves, then SIGTERM, a second later SIGKILL; a second Ctrl-C is SIGKILL at once. Should
// this process be killed itself, the system kills the ranks.
//
// A rank that ends with 0 before the others is no failure. One that came later counts once it has
// said that it is a rank (tell_launcher_met).
//
// Says on `errors` which rank was killed or failed silently. A line "dynmo: ..." that another
// rank has printed already is shown once.
//
// To be called in the process's main thread, before it starts others: they would take the signals.
// kBadInput if the program cannot be started.
[[nodiscard]] Expected<int> launch_ranks(const LaunchOptions& options);

}  // namespace dynmo::process
