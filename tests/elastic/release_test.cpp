// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/release.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"

namespace dynmo::elastic {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Time = Releases::Time;

constexpr Time kStart{};

// Ranks first .. last, `ranks_per_host` on each of node0, node1, ...
std::vector<Member> ranks(int first, int last, int ranks_per_host = 2) {
  std::vector<Member> result;
  for (int number = first; number <= last; ++number) {
    result.push_back(
        {.id = {}, .number = number, .host = fmt::format("node{}", number / ranks_per_host)});
  }
  return result;
}

std::map<std::string, std::string> environment_of(const Release& release) {
  const Variables variables = hook_environment(release, "runs/a");
  return {variables.begin(), variables.end()};
}

TEST(Release, TellsTheHookWhoHasEndedAndWhoRuns) {
  const Release release{.number = 3, .released = ranks(3, 6), .kept = ranks(0, 2), .calls = 2};
  const std::map<std::string, std::string> wanted = {{"DYNMO_RELEASE", "3"},
                                                     {"DYNMO_RELEASE_CALL", "2"},
                                                     {"DYNMO_RELEASED_HOSTS", "node2,node3"},
                                                     {"DYNMO_KEPT_HOSTS", "node0,node1"},
                                                     {"DYNMO_RELEASED_RANKS", "3,4,5,6"},
                                                     {"DYNMO_KEPT_RANKS", "0,1,2"},
                                                     {"DYNMO_RUN", "runs/a"}};
  EXPECT_EQ(environment_of(release), wanted);
}

TEST(Release, AHostWithARankLeftIsNotGivenBack) {
  Release release{.number = 1, .released = ranks(3, 3), .kept = ranks(0, 2)};
  EXPECT_EQ(released_hosts(release), std::vector<std::string>());
  EXPECT_EQ(environment_of(release).at("DYNMO_RELEASED_HOSTS"), "");
  // Its last rank takes it along.
  release = {.number = 2, .released = ranks(2, 2), .kept = ranks(0, 1)};
  EXPECT_EQ(released_hosts(release), std::vector<std::string>{"node1"});
}

TEST(Releases, CallTheHookOnceThatSucceeds) {
  Releases releases;
  EXPECT_EQ(releases.add(ranks(2, 3), ranks(0, 1)), 1);
  const auto call = releases.next(kStart);
  ASSERT_TRUE(call);
  EXPECT_EQ(call->number, 1);
  EXPECT_EQ(call->calls, 1);
  EXPECT_EQ(call->released, ranks(2, 3));
  EXPECT_EQ(call->kept, ranks(0, 1));
  EXPECT_FALSE(releases.next(kStart + std::chrono::hours(1)));  // it is under way
  EXPECT_EQ(releases.ended(kHookDone, kStart), ReleaseOutcome::kDone);
  EXPECT_FALSE(releases.next(kStart + std::chrono::hours(1)));
  EXPECT_TRUE(releases.is_idle());
  EXPECT_TRUE(releases.parked().empty());
}

TEST(Releases, CallAgainWithGrowingPausesWhatIsNotNow) {
  Releases releases({.max_calls = 5, .first_pause = seconds(5), .max_pause = seconds(15)});
  releases.add(ranks(2, 3), ranks(0, 1));
  Time now = kStart;
  int calls = 0;
  for (const seconds pause : {seconds(5), seconds(10), seconds(15), seconds(15)}) {
    const auto call = releases.next(now);
    ASSERT_TRUE(call);
    EXPECT_EQ(call->calls, ++calls);
    EXPECT_EQ(call->number, 1);
    EXPECT_EQ(releases.ended(kHookNotNow, now), ReleaseOutcome::kNotNow);
    EXPECT_EQ(releases.due(), now + pause);
    EXPECT_FALSE(releases.next(now + pause - milliseconds(1)));
    now += pause;
  }
  ASSERT_TRUE(releases.next(now));
  EXPECT_EQ(releases.ended(kHookDone, now), ReleaseOutcome::kDone);
  EXPECT_TRUE(releases.is_idle());
}

TEST(Releases, ParkWhatIsNeverNow) {
  Releases releases({.max_calls = 3});
  releases.add(ranks(2, 3), ranks(0, 1));
  Time now = kStart;
  for (int call = 1; call <= 3; ++call, now += std::chrono::hours(1)) {
    ASSERT_TRUE(releases.next(now));
    EXPECT_EQ(releases.ended(kHookNotNow, now),
              call < 3 ? ReleaseOutcome::kNotNow : ReleaseOutcome::kParked);
  }
  EXPECT_FALSE(releases.next(now));
  ASSERT_EQ(releases.parked().size(), 1U);
  EXPECT_EQ(releases.parked()[0].released, ranks(2, 3));
  EXPECT_EQ(releases.parked()[0].calls, 3);
}

TEST(Releases, WhatIsParkedCanBeTriedAgainAsOftenAsAtFirst) {
  Releases releases({.max_calls = 2});
  EXPECT_EQ(releases.try_again(kStart), 0);
  releases.add(ranks(2, 3), ranks(0, 1));
  ASSERT_TRUE(releases.next(kStart));
  releases.failed();
  releases.add(ranks(1, 1), ranks(0, 0));
  EXPECT_EQ(releases.try_again(kStart), 1);
  EXPECT_TRUE(releases.parked().empty());
  Time now = kStart;
  auto call = releases.next(now);
  ASSERT_TRUE(call);
  EXPECT_EQ(call->number, 1);  // the older first
  EXPECT_EQ(call->calls, 2);
  EXPECT_EQ(call->kept, ranks(0, 0));
  EXPECT_EQ(releases.ended(kHookNotNow, now), ReleaseOutcome::kNotNow);
  EXPECT_EQ(releases.next(now)->number, 2);
  EXPECT_EQ(releases.ended(kHookDone, now), ReleaseOutcome::kDone);
  now += std::chrono::hours(1);
  call = releases.next(now);
  ASSERT_TRUE(call);
  EXPECT_EQ(call->calls, 3);
  EXPECT_EQ(releases.ended(kHookNotNow, now), ReleaseOutcome::kParked);
  EXPECT_EQ(releases.try_again(now), 1);
  ASSERT_TRUE(releases.next(now));
  EXPECT_EQ(releases.ended(kHookDone, now), ReleaseOutcome::kDone);
  EXPECT_TRUE(releases.is_idle());
}

TEST(Releases, AnotherLeaderGoesOnWithAllButTheOneUnderWay) {
  Releases before;
  for (int i = 0; i < 3; ++i) {
    before.add(ranks(9 - i, 9 - i), ranks(0, 8 - i));
  }
  ASSERT_TRUE(before.next(kStart));
  before.failed();
  ASSERT_TRUE(before.next(kStart));  // the second is under way
  Releases after;
  after.take_over(before.open());
  before.forget_open();
  EXPECT_EQ(before.ended(kHookDone, kStart), ReleaseOutcome::kDone);
  EXPECT_TRUE(before.is_idle() && before.parked().empty());
  after.set_running(ranks(1, 6));
  ASSERT_EQ(after.parked().size(), 1U);
  EXPECT_EQ(after.parked()[0].number, 1);
  EXPECT_EQ(after.parked()[0].calls, 1);
  EXPECT_EQ(after.add(ranks(0, 0), ranks(1, 6)), 4);
  for (const int number : {3, 4}) {
    const auto call = after.next(kStart);
    ASSERT_TRUE(call);
    EXPECT_EQ(call->number, number);
    EXPECT_EQ(call->kept, ranks(1, 6));
    EXPECT_EQ(after.ended(kHookDone, kStart), ReleaseOutcome::kDone);
  }
  EXPECT_TRUE(after.is_idle());
}

TEST(Releases, ParkEveryOtherFailureAtOnce) {
  for (const int code : {1, 2, 74, 76, 126, 127, 255}) {
    Releases releases;
    releases.add(ranks(2, 3), ranks(0, 1));
    ASSERT_TRUE(releases.next(kStart));
    EXPECT_EQ(releases.ended(code, kStart), ReleaseOutcome::kParked) << code;
    EXPECT_EQ(releases.parked().size(), 1U);
  }
  Releases releases;
  releases.add(ranks(2, 3), ranks(0, 1));
  ASSERT_TRUE(releases.next(kStart));
  releases.failed();
  EXPECT_EQ(releases.parked().size(), 1U);
  EXPECT_TRUE(releases.is_idle());
}

TEST(Releases, OneThatWaitsLetsTheNextPass) {
  Releases releases;
  releases.add(ranks(6, 7), ranks(0, 5));
  ASSERT_TRUE(releases.next(kStart));
  EXPECT_EQ(releases.ended(kHookNotNow, kStart), ReleaseOutcome::kNotNow);
  releases.add(ranks(4, 5), ranks(0, 3));
  EXPECT_EQ(releases.next(kStart)->number, 2);
  EXPECT_FALSE(releases.due());
  EXPECT_EQ(releases.ended(kHookDone, kStart), ReleaseOutcome::kDone);
  EXPECT_EQ(releases.next(*releases.due())->number, 1);
}

// The first release is tried again when rank 9 has joined on a host of it and ranks 4 and 5 have
// gone.
TEST(Releases, ARetryNeverGivesBackWhatIsInUse) {
  Releases releases;
  releases.add(ranks(6, 9), ranks(0, 5));
  EXPECT_EQ(released_hosts(*releases.next(kStart)), (std::vector<std::string>{"node3", "node4"}));
  EXPECT_EQ(releases.ended(kHookNotNow, kStart), ReleaseOutcome::kNotNow);
  std::vector<Member> running = ranks(0, 3);
  running.push_back({.id = {}, .number = 10, .host = "node4"});
  releases.set_running(running);
  const auto again = releases.next(kStart + std::chrono::hours(1));
  ASSERT_TRUE(again);
  EXPECT_EQ(released_hosts(*again), std::vector<std::string>{"node3"});
  EXPECT_EQ(again->kept, running);
  EXPECT_EQ(again->released, ranks(6, 9));
}

TEST(Releases, ParkWhatWaitsWhenTheRunEnds) {
  Releases releases;
  releases.add(ranks(6, 7), ranks(0, 5));
  releases.add(ranks(4, 5), ranks(0, 3));
  ASSERT_TRUE(releases.next(kStart));
  EXPECT_EQ(releases.ended(kHookNotNow, kStart), ReleaseOutcome::kNotNow);
  const auto left = releases.give_up();
  ASSERT_EQ(left.size(), 2U);
  EXPECT_EQ(left[0].number, 1);
  EXPECT_EQ(left[1].calls, 0);
  EXPECT_EQ(releases.parked().size(), 2U);
  EXPECT_TRUE(releases.is_idle());
}

TEST(Releases, RefuseWhatNoCallerMeans) {
  Releases releases;
  EXPECT_THROW(releases.add({}, ranks(0, 1)), CheckFailure);
  EXPECT_THROW(releases.add(ranks(1, 2), ranks(0, 1)), CheckFailure);
  EXPECT_THROW((void)releases.ended(0, kStart), CheckFailure);
  EXPECT_THROW(releases.failed(), CheckFailure);
}

// Random codes and times: every release ends done or parked, is called again only after 75, never
// more often than allowed, and one at a time.
TEST(Releases, EveryReleaseEndsOnceUnderAnyAnswers) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Rng rng(seed);
    const HookRetries retries{.max_calls = 1 + static_cast<int>(rng.below(4))};
    Releases releases(retries);
    std::map<std::int64_t, int> calls, ends, last_code;
    Time now = kStart;
    int added = 0;
    while (added < 5 || !releases.is_idle()) {
      if (added < 5 && rng.below(3) == 0) {
        releases.add(ranks(20 - 2 * added, 21 - 2 * added), ranks(0, 19 - 2 * added));
        ++added;
      }
      if (const auto call = releases.next(now)) {
        const std::int64_t number = call->number;
        ASSERT_EQ(ends[number], 0) << "seed " << seed;
        ASSERT_EQ(call->calls, ++calls[number]) << "seed " << seed;
        ASSERT_TRUE(calls[number] == 1 || last_code[number] == kHookNotNow) << "seed " << seed;
        ASSERT_FALSE(releases.next(now)) << "seed " << seed;
        const int codes[] = {0, 1, kHookNotNow, kHookNotNow};
        last_code[number] = codes[rng.below(4)];
        if (releases.ended(last_code[number], now) != ReleaseOutcome::kNotNow) ++ends[number];
      }
      now += seconds(rng.below(20));
    }
    for (std::int64_t number = 1; number <= 5; ++number) {
      ASSERT_EQ(ends[number], 1) << "seed " << seed;
      ASSERT_LE(calls[number], retries.max_calls) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace dynmo::elastic
