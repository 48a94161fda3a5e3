// SPDX-License-Identifier: Apache-2.0
#pragma once

// The programs that the ranks of a launcher have started and that end with the run
// (tell_launcher_hook), such as the hooks of releases.

#include <sys/types.h>

#include <vector>

#include "dynmo/process/sockets.h"

namespace dynmo::process {

class StartedHooks {
 public:
  // Adds a program. `pid` is that of the program and of its process group. A program that has ended
  // is left out.
  void add(pid_t pid);
  // Sends SIGTERM to the process groups that still run, and SIGKILL a second later. A hook has its
  // own group, so Ctrl-C does not reach it, and it survives a rank that is killed.
  void end();

 private:
  struct Hook {
    pid_t group = -1;
    // Refers to the program itself, also after its number is reused.
    UniqueFd process;
  };
  void forget_ended();

  std::vector<Hook> hooks_;
};

}  // namespace dynmo::process
