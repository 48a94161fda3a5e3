// SPDX-License-Identifier: Apache-2.0
#pragma once

// Starts the ranks of a run as processes of this host, shows their output, and ensures that they
// end together. `dynmo train` does this if no other program (torchrun, srun) has started the ranks.
//
// Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as
// from torchrun. It gets one thread for OpenMP and MKL unless the user set another number. No other
// program can take the port meanwhile. The launcher listens on it from the start and passes the
// socket to rank 0 (DYNMO_STORE_FD, read by rank_environment.h). Knows nothing of libtorch.

#include <unistd.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::process {

struct LaunchOptions {
  int ranks = 1;
  // Program and arguments. The program is looked up in PATH if it has no '/'.
  std::vector<std::string> command;
  std::vector<std::pair<std::string, std::string>> environment = {};  // added to this process's
  std::string address = "127.0.0.1";  // of this host, where the ranks meet
  std::vector<int> cores = {};        // rank i is pinned to cores[i % size], or none if empty
  // The command of a rank that starts on request (ask_for_ranks), or empty if none does. Its
  // environment names no rank.
  std::vector<std::string> late_command = {};
  // Set if ranks survive losses. It applies once a rank has said that the ranks have met. The
  // others then continue if a rank is killed by a signal, ends with 1 (a defect), or with 5 (hung
  // or left out). They end by themselves if they cannot continue. The exit code is then that of the
  // last ranks.
  bool survives = false;
  // The output below is that of all ranks, because any of them may have to report.
  bool all_report = false;
  int output = STDOUT_FILENO;  // becomes rank 0's own stdout
  // All other output of the ranks, in whole lines, with "[rank 2] " in front.
  int errors = STDERR_FILENO;
  std::chrono::milliseconds grace{4000};             // for other ranks to end after a failure
  std::chrono::milliseconds interrupt_grace{10000};  // for all ranks to end after Ctrl-C
  // Time to finish a step and write a checkpoint after SIGTERM or SIGUSR1.
  std::chrono::milliseconds stop_grace{600000};
};

// Starts the ranks, and returns the exit code of the run when all processes have ended. It is 0 if
// all ended with 0. It is 5 if a rank was killed by a signal. Otherwise it is that of the first
// rank that failed by itself (5 if it has lost another rank).
//
// It is 130 after SIGINT, SIGTERM, SIGUSR1 or SIGHUP to this process, unless all ranks end with 0.
// The ranks get the signal, too. A SIGINT counts even if a script's `&` makes this process ignore
// it. A SIGHUP that nohup makes it ignore does not count. A second Ctrl-C is SIGKILL at once.
//
// After a failure the others have `grace` to end by themselves. Then they get SIGTERM, and SIGKILL
// a second later. If this process is killed, the system kills the ranks.
//
// A rank that ends with 0 before the others is no failure. A late rank counts once it has said that
// it is a rank (tell_launcher_met). Until then it ends at most `grace` after the last rank.
//
// Says on `errors` which rank was killed or failed silently. A line "dynmo: ..." that several ranks
// print is shown once.
//
// Call it in the process's main thread, before other threads start, because they would take the
// signals. Returns kBadInput if the program cannot be started.
[[nodiscard]] Expected<int> launch_ranks(const LaunchOptions& options);

}  // namespace dynmo::process
