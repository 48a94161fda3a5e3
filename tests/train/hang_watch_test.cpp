// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/hang_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

namespace dynmo::train {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLimit{200};

TEST(HangWatch, EndsWhoDoesNothing) {
  std::promise<void> ended;
  const HangWatch watch(kLimit, [&] { ended.set_value(); });
  EXPECT_EQ(ended.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
}

TEST(HangWatch, WhoWaitsDoesNotHangAndMayHangLater) {
  std::promise<void> ended;
  auto when = ended.get_future();
  const HangWatch watch(kLimit, [&] { ended.set_value(); });
  {
    const WaitMark outer;
    { const WaitMark inner; }
    EXPECT_EQ(when.wait_for(4 * kLimit), std::future_status::timeout);
  }
  EXPECT_EQ(when.wait_for(std::chrono::seconds(60)), std::future_status::ready);
}

TEST(HangWatch, WhoReportsLongWorkDoesNotHangAndMayHangLater) {
  std::promise<void> ended;
  auto when = ended.get_future();
  const HangWatch watch(kLimit, [&] { ended.set_value(); });
  for (int i = 0; i < 80; ++i) {
    note_progress();
    ASSERT_EQ(when.wait_for(kLimit / 20), std::future_status::timeout) << i;
  }
  EXPECT_EQ(when.wait_for(std::chrono::seconds(60)), std::future_status::ready);
}

TEST(HangWatch, WaitsAndWorkOfAnotherThreadDoNotCount) {
  std::promise<void> ended;
  const auto when = ended.get_future().share();
  const HangWatch watch(kLimit, [&] { ended.set_value(); });
  std::thread other([when] {
    const WaitMark waits;
    for (int i = 0; i < 6000 && when.wait_for(kLimit / 20) == std::future_status::timeout; ++i) {
      note_progress();
    }
  });
  EXPECT_EQ(when.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  other.join();
}

TEST(HangWatch, WhoseDeviceWaitsDoesNotHangAndMayHangLater) {
  constexpr int kAsked = 60;  // for longer than the limit
  std::atomic<int> asked{0};
  std::promise<void> ended;
  HangWatch watch(kLimit, [&] { ended.set_value(); });
  watch.set_device([&] { return ++asked < kAsked; });
  EXPECT_EQ(ended.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  EXPECT_GE(asked, kAsked);
}

TEST(HangWatch, WhoIsDoneIsNotWatched) {
  bool ended = false;
  {
    HangWatch watch(std::chrono::hours(1), [&] { ended = true; });
    note_progress();
  }
  const WaitMark none;
  EXPECT_FALSE(ended);
}

}  // namespace
}  // namespace dynmo::train
