// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/ending.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace dynmo::process {
namespace {

// A copy of this process that waits for signals.
pid_t start_waiting() {
  const pid_t child = fork();
  if (child == 0) {
    while (true) pause();
  }
  return child;
}

TEST(Ending, AStateIsThatOfTheSystemUntilTheProcessIsKilled) {
  EXPECT_EQ(state_of(getpid()), 'R');
  const pid_t child = start_waiting();
  kill(child, SIGSTOP);
  waitpid(child, nullptr, WUNTRACED);
  EXPECT_EQ(state_of(child), 'T');
  kill(child, SIGKILL);
  // Where it is on its way to its end is the system's matter; it stays ended.
  while (state_of(child) != 'X') {
  }
  siginfo_t ended{};
  waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT);
  EXPECT_EQ(state_of(child), 'X');
  waitpid(child, nullptr, 0);
  EXPECT_EQ(state_of(child), ' ');
}

TEST(Ending, NoThreadOfAnotherNameIsFound) {
  EXPECT_FALSE(end_of_thread(getpid(), "no such thread"));
}

}  // namespace
}  // namespace dynmo::process
