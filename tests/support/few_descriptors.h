// SPDX-License-Identifier: Apache-2.0
#pragma once

// A process without free descriptors, and counts of the calls that a loop makes in vain there. One
// file of a test program includes this: its accept4 and poll replace the system's, count, and call
// the system. It is compiled by itself, outside unity builds.

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <thread>

#include "tests/support/no_free_descriptor.h"

namespace dynmo::testing {

struct SystemCalls {
  std::atomic<int> accepts = 0;
  std::atomic<int> failed_accepts = 0;  // without a free descriptor
  std::atomic<int> polls = 0;
};
inline SystemCalls calls;

}  // namespace dynmo::testing

extern "C" {
inline __attribute__((used)) int accept4(int fd, sockaddr* address, socklen_t* length, int flags) {
  ++dynmo::testing::calls.accepts;
  const auto got = static_cast<int>(::syscall(SYS_accept4, fd, address, length, flags));
  if (got < 0 && errno == EMFILE) ++dynmo::testing::calls.failed_accepts;
  return got;
}
inline __attribute__((used)) int poll(pollfd* events, nfds_t count, int timeout) {
  ++dynmo::testing::calls.polls;
  timespec time{.tv_sec = timeout / 1000, .tv_nsec = timeout % 1000 * 1'000'000L};
  return static_cast<int>(
      ::syscall(SYS_ppoll, events, count, timeout < 0 ? nullptr : &time, nullptr, 0));
}
}

namespace dynmo::testing {

// Waits until `count` calls of accept4 have failed since the start. False: they did not within a
// minute.
inline bool wait_for_failed_accepts(int count) {
  for (int i = 0; i < 60000 && calls.failed_accepts < count; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return calls.failed_accepts >= count;
}

// The calls since it was made, against the most that a loop makes that pauses.
class Calls {
 public:
  [[nodiscard]] int accepts() const { return calls.accepts - accepts_; }
  [[nodiscard]] int polls() const { return calls.polls - polls_; }
  // One in each `period`, and a few more. More time only allows more.
  [[nodiscard]] int most(std::chrono::milliseconds period) const {
    return 5 + static_cast<int>((std::chrono::steady_clock::now() - since_) / period);
  }

 private:
  int accepts_ = calls.accepts;
  int polls_ = calls.polls;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

// Runs `work` in a process of its own, which is killed after two minutes. Returns whether nothing
// failed there.
inline bool passes_in_own_process(const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(120);
    try {
      work();
    } catch (const std::exception& fault) {
      ADD_FAILURE() << fault.what();
    }
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace dynmo::testing
