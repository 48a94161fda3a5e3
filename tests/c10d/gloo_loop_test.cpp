// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <array>
#include <cerrno>
#include <cstdint>

#include "dynmo/process/sockets.h"

namespace dynmo::c10d {
namespace {

constexpr int kGlooTimeout = 10;

// Descriptors of which one can be read or not.
struct Polled {
  process::UniqueFd event{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  process::UniqueFd poll{epoll_create1(EPOLL_CLOEXEC)};
  std::array<epoll_event, 4> found{};

  Polled() {
    epoll_event wanted{.events = EPOLLIN, .data = {.u64 = 7}};
    EXPECT_EQ(epoll_ctl(poll.get(), EPOLL_CTL_ADD, event.get(), &wanted), 0);
  }
  void fill() const { EXPECT_EQ(eventfd_write(event.get(), 1), 0); }
  int wait(int timeout) {
    return epoll_wait(poll.get(), found.data(), static_cast<int>(found.size()), timeout);
  }
};

// How often this thread has given its processor away.
std::int64_t given_away() {
  rusage usage{};
  EXPECT_EQ(getrusage(RUSAGE_THREAD, &usage), 0);
  return usage.ru_nvcsw;
}

TEST(GlooLoop, SaysWhatIsReady) {
  Polled polled;
  EXPECT_EQ(polled.wait(kGlooTimeout), 0);
  EXPECT_EQ(polled.wait(0), 0);
  polled.fill();
  for (const int timeout : {kGlooTimeout, 0, -1, kGlooTimeout, kGlooTimeout}) {
    ASSERT_EQ(polled.wait(timeout), 1) << timeout;
    EXPECT_EQ(polled.found[0].data.u64, 7U);
    EXPECT_EQ(polled.found[0].events, static_cast<std::uint32_t>(EPOLLIN));
  }
  errno = 0;
  EXPECT_EQ(epoll_wait(-1, polled.found.data(), 4, kGlooTimeout), -1);
  EXPECT_EQ(errno, EBADF);
}

// An event that is there lets nobody wait, so only the sleep gives the processor away.
TEST(GlooLoop, AThreadThatAsksAgainAtOnceGivesItsProcessorAway) {
  Polled polled;
  polled.fill();
  const std::int64_t before = given_away();
  int asked = 0;
  constexpr int kBound = 1'000'000;
  while (given_away() < before + 3 && asked < kBound) {
    for (int i = 0; i < 64; ++i, ++asked) ASSERT_EQ(polled.wait(kGlooTimeout), 1);
  }
  EXPECT_LT(asked, kBound);
}

}  // namespace
}  // namespace dynmo::c10d
