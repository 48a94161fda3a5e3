// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <utility>

#include "dynmo/process/started_hooks_impl.h"

namespace dynmo::process {
namespace {

constexpr std::chrono::milliseconds kTerminateTime{1000};  // from SIGTERM to SIGKILL

}  // namespace

void StartedHooks::add(pid_t pid) {
  forget_ended();
  UniqueFd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (process) hooks_.push_back({.group = pid, .process = std::move(process)});
}

void StartedHooks::end() {
  forget_ended();
  for (const Hook& hook : hooks_) {
    kill(-hook.group, SIGTERM);
    kill(-hook.group, SIGCONT);
  }
  const auto deadline = std::chrono::steady_clock::now() + kTerminateTime;
  for (const Hook& hook : hooks_) {
    wait_for(hook.process, POLLIN, deadline);
    kill(-hook.group, SIGKILL);  // also ends its own children
  }
}

void StartedHooks::forget_ended() {
  std::erase_if(hooks_, [](const Hook& one) { return wait_for(one.process, POLLIN, {}); });
}

}  // namespace dynmo::process
