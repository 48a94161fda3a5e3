// SPDX-License-Identifier: Apache-2.0
// Gives Gloo's loop patience.
//
// Gloo has one thread a process that waits for sockets with epoll_wait. Where another thread holds
// the lock of a connection that has something to read, Gloo's passes over it and asks again at
// once, until the lock is free. On a host with fewer processors than threads that takes long: the
// thread that holds the lock writes to a socket, which wakes the peer, which gets the holder's
// processor; the loop then asks until its time slice is used up, some milliseconds, which the
// holder would need. Measured with four ranks on two cores: a third of the processor time of a
// migration.
//
// Gloo has no option for it. So a program that links dynmo::gloo_loop has its own epoll_wait: the
// system's, but that a thread that is answered again and again at once sleeps for some microseconds
// before it asks the next time, and that none waits for long while a group is closed
// (closing_groups.h). Only Gloo's waits are meant: those of 10 ms. The library itself leaves the
// name alone.
#include <sys/epoll.h>
#include <time.h>

#include <chrono>

#include "dynmo/c10d/closing_groups.h"

namespace dynmo::c10d {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kGlooTimeout = 10;  // ms
constexpr int kClosingTimeout = 1;
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

}  // namespace dynmo::c10d

extern "C" __attribute__((visibility("default"))) int epoll_wait(int fd, epoll_event* events,
                                                                 int max_events, int timeout) {
  using namespace dynmo::c10d;  // NOLINT: a name of the system's, in no namespace
  if (timeout != kGlooTimeout) return epoll_pwait(fd, events, max_events, timeout, nullptr);
  thread_local Patience patience;
  if (patience.at_once > kAllowed) (void)nanosleep(&kNap, nullptr);
  if (closing_groups > 0) timeout = kClosingTimeout;
  const int count = epoll_pwait(fd, events, max_events, timeout, nullptr);
  if (count > 0) patience.answer();
  return count;
}
