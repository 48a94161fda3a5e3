// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/losses.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "dynmo/core/rng.h"

namespace dynmo::train {
namespace {

const Error kWhy = make_error(ErrorCode::kPeerLost, "rank 1 was lost: its process has ended");

// Notes losses, each after a number of steps, until they are too many. Returns the number of noted
// losses. Each group begins a step.
std::size_t noted(Losses& losses, const std::vector<std::int64_t>& reached) {
  for (std::size_t i = 0; i < reached.size(); ++i) {
    losses.begin_step(losses.known().begun + 1);
    const auto done = losses.note(Losses::with_another({losses.known()}, reached[i]), kWhy);
    EXPECT_EQ(!done, losses.too_many());
    if (!done) return i + 1;
  }
  return reached.size();
}

TEST(Losses, TheThirdOfOneStepIsTooMuch) {
  Losses losses({});
  EXPECT_EQ(noted(losses, {5, 5, 5, 5}), 3U);
  const auto done = losses.note(losses.known(), kWhy);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kPeerLost);
  EXPECT_EQ(done.error().message,
            "step 5 was lost 3 times, at last: rank 1 was lost: its process has ended");
}

TEST(Losses, OfStepsThatTheRunHasDoneSinceAreForgotten) {
  Losses losses({});
  EXPECT_EQ(noted(losses, {5, 5, 6, 6, 7, 9, 9, 12}), 8U);
  EXPECT_FALSE(losses.too_many());
  EXPECT_EQ(losses.known().counts, (Losses::Counts{{12, 1}}));
}

// A rank that fails in the update of a step is lost before or after the others have done theirs.
TEST(Losses, AStepThatIsLostNowBeforeItsEndAndNowAfterItEndsTheRun) {
  Losses losses({});
  EXPECT_EQ(noted(losses, {10, 9, 10, 9, 10, 9}), 5U);
}

TEST(Losses, ARunThatGetsNoFurtherEnds) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Rng rng(mix_key({seed, 0x105}));
    const std::uint64_t steps = 1 + rng.below(6);
    Losses losses({});
    std::vector<std::int64_t> reached;
    for (int i = 0; i < 10000; ++i) reached.push_back(static_cast<std::int64_t>(rng.below(steps)));
    EXPECT_LT(noted(losses, reached), reached.size()) << "seed " << seed;
  }
}

TEST(Losses, NewcomersLearnOfThoseBefore) {
  const Losses::Known before{.counts = {{5, 2}, {8, 1}}, .begun = 6, .counted = 4};
  const Losses::Known other{.counts = {{8, 2}}, .begun = 5, .counted = 5};
  const Losses::Known after = Losses::with_another({{}, before, other}, 5);
  EXPECT_EQ(after.counts, (Losses::Counts{{5, 3}, {8, 2}}));
  EXPECT_EQ(after.begun, 6);
  EXPECT_EQ(after.counted, 6);
}

// They are of one failure: no step was tried between them.
TEST(Losses, InTheRecoveryFromAnotherDoNotCount) {
  Losses losses({});
  EXPECT_TRUE(Losses::with_another({losses.known()}, 5).counts.empty()) << "no step was begun";
  for (const Generation group : {0, 3}) {
    losses.begin_step(group);
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(losses.note(Losses::with_another({losses.known()}, 5), kWhy));
    }
  }
  EXPECT_EQ(losses.known().counts, (Losses::Counts{{5, 2}}));
  // Only one of the ranks has noted the loss before.
  Losses noted({});
  noted.begin_step(2);
  const Losses::Known missed = noted.known();
  EXPECT_TRUE(noted.note(Losses::with_another({noted.known()}, 5), kWhy));
  EXPECT_EQ(Losses::with_another({missed, noted.known()}, 5).counts, (Losses::Counts{{5, 1}}));
}

}  // namespace
}  // namespace dynmo::train
