// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <utility>

#include "dynmo/process/started_hooks_impl.h"

namespace dynmo::process {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTerminateTime{1000};  // from SIGTERM to SIGKILL

// Returns whether the process of this descriptor ends within `at_most`.
bool has_ended(const UniqueFd& process, milliseconds at_most = milliseconds(0)) {
  pollfd event{.fd = process.get(), .events = POLLIN, .revents = 0};
  return poll(&event, 1, static_cast<int>(at_most.count())) > 0;
}

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
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    has_ended(hook.process, std::max(left, milliseconds(0)));
    kill(-hook.group, SIGKILL);  // also ends its own children
  }
}

void StartedHooks::forget_ended() {
  std::erase_if(hooks_, [](const Hook& one) { return has_ended(one.process); });
}

}  // namespace dynmo::process
