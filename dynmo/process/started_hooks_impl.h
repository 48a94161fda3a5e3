// SPDX-License-Identifier: Apache-2.0
#pragma once

// The programs that the ranks of a launcher have started and that end with the run
// (tell_launcher_hook), as the hooks of releases.

#include <sys/types.h>

#include <vector>

#include "dynmo/process/sockets.h"

namespace dynmo::process {

class StartedHooks {
 public:
  // `pid` is that of the program and of its process group. One that has ended is left out.
  void add(pid_t pid);
  // SIGTERM to all that still run, with what they have started; SIGKILL a second later. A hook has
  // a group of its own, so that Ctrl-C does not reach it, and a rank that is killed leaves it.
  void end();

 private:
  struct Hook {
    pid_t group = -1;
    UniqueFd process;  // names the program itself, also once its number is another's
  };
  void forget_ended();

  std::vector<Hook> hooks_;
};

}  // namespace dynmo::process
