// SPDX-License-Identifier: Apache-2.0
#include <sys/epoll.h>
#include <time.h>

#include <chrono>

#include "dynmo/c10d/gloo_loop_impl.h"

namespace dynmo::c10d {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kGlooTimeout = 10;  // ms
// Answers that follow one another like this, so many times, are of nothing that was done: there is
// a call of the system between two messages at each end.
constexpr std::chrono::nanoseconds kAtOnce{2000};
constexpr int kAllowed = 8;
constexpr timespec kNap{.tv_sec = 0, .tv_nsec = 20000};

// Each thread has one.
struct Patience {
  Clock::time_point answered = {};
  int at_once = 0;

  void answer() {
    const auto now = Clock::now();
    at_once = now - answered < kAtOnce ? at_once + 1 : 0;
    answered = now;
  }
};

}  // namespace

void have_patient_gloo_loop() {}

}  // namespace dynmo::c10d

extern "C" __attribute__((visibility("default"))) int epoll_wait(int fd, epoll_event* events,
                                                                 int max_events, int timeout) {
  using namespace dynmo::c10d;  // NOLINT: a name of the system's, in no namespace
  if (timeout != kGlooTimeout) return epoll_pwait(fd, events, max_events, timeout, nullptr);
  thread_local Patience patience;
  if (patience.at_once > kAllowed) (void)nanosleep(&kNap, nullptr);
  const int count = epoll_pwait(fd, events, max_events, timeout, nullptr);
  if (count > 0) patience.answer();
  return count;
}
