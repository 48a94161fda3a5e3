// SPDX-License-Identifier: Apache-2.0
// Stops Gloo's loop from spinning.
//
// Gloo has one thread a process that waits for sockets with epoll_wait. If another thread holds the
// lock of a readable connection, Gloo's thread skips it and asks again at once, until the lock is
// free. On a host with fewer processors than threads that takes long. The holder of the lock writes
// to a socket, which wakes the peer, which gets the holder's processor. The loop then spins for its
// time slice of some milliseconds, which the holder would need. With four ranks on two cores this
// was a third of the processor time of a migration.
//
// Gloo has no option for it. So a program that links dynmo::gloo_loop has its own epoll_wait, which
// calls the system's. A thread that gets several answers at once sleeps for some microseconds
// before its next call. While a group is closed, no thread waits for long (closing_groups.h). This
// holds only for waits of 10 ms, which are Gloo's. Libraries of DynMo do not define the name.
#include <sys/epoll.h>
#include <time.h>

#include <chrono>

#include "dynmo/c10d/closing_groups.h"

namespace dynmo::c10d {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kGlooTimeout = 10;  // ms
constexpr int kClosingTimeout = 1;
// More than kAllowed answers, each within kAtOnce of the last, mean that no message was read.
// Reading one needs a system call at each end.
constexpr std::chrono::nanoseconds kAtOnce{2000};
constexpr int kAllowed = 8;
constexpr timespec kNap{.tv_sec = 0, .tv_nsec = 20000};

// The answers of a thread's last calls: the time of the newest, and how many came at once.
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
