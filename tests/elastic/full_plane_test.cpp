// SPDX-License-Identifier: Apache-2.0
// A control plane in a process without a free descriptor.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "dynmo/elastic/control_plane.h"
#include "dynmo/process/sockets.h"
#include "tests/support/few_descriptors.h"

namespace dynmo::elastic {
namespace {

using dynmo::testing::Calls;
using std::chrono::milliseconds;

constexpr milliseconds kHour{3'600'000};
constexpr milliseconds kBeat{20};

std::shared_ptr<ControlPlane> quiet_plane(std::uint64_t member) {
  return ControlPlane::start({.id = MemberId{member}, .period = kBeat, .silence = kHour});
}

WatchOptions rank_of_three(int rank) {
  return {.generation = 3, .rank = WorldRank(rank), .size = 3};
}

void watch_without_descriptors() {
  const auto first = quiet_plane(1);
  const auto second = quiet_plane(2);
  const auto third = quiet_plane(3);
  ASSERT_TRUE(first->listen("127.0.0.1"));
  const auto watch = first->open(rank_of_three(0));
  const auto old = second->join(rank_of_three(1), first->place(), kHour);
  ASSERT_TRUE(old);
  watch->tell("begin", "a word");
  EXPECT_TRUE((*old)->wait_for({"begin"}, kHour).value());
  std::unique_ptr<GroupWatch> late;
  process::UniqueFd last(::dup(STDERR_FILENO));
  {
    const NoFreeDescriptor none;
    EXPECT_FALSE(first->take_failure());
    last.reset();  // for the third one's end of its connection
    auto joined = third->join(rank_of_three(2), first->place(), kHour);
    ASSERT_TRUE(joined) << joined.error().message;
    late = *std::move(joined);
    ASSERT_TRUE(dynmo::testing::wait_for_failed_accepts(1));
    const Calls busy;
    for (int i = 0; i < 200; ++i) {
      const std::string key = std::to_string(i);
      watch->tell(key, "a word");
      EXPECT_TRUE((*old)->wait_for({key}, kHour).value());
    }
    EXPECT_LE(busy.accepts(), busy.most(milliseconds(50)));
    const Calls idle;
    ASSERT_TRUE(dynmo::testing::wait_for_failed_accepts(dynmo::testing::calls.failed_accepts + 2));
    EXPECT_LE(idle.polls(), idle.most(milliseconds(1)));
    const auto failure = first->take_failure();
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->substr(0, 41), "new connections wait: Too many open files");
    EXPECT_FALSE(first->take_failure()) << "it is said once";
    EXPECT_FALSE(late->told("0"));
  }
  EXPECT_TRUE(late->wait_for({"0", "199"}, kHour).value());
  EXPECT_FALSE(watch->verdict());
  EXPECT_FALSE((*old)->verdict());
}

TEST(FullPlane, WaitsWithoutSpinningAndKeepsItsRanks) {
  EXPECT_TRUE(dynmo::testing::passes_in_own_process(watch_without_descriptors));
}

}  // namespace
}  // namespace dynmo::elastic
