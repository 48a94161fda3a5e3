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

// Notes losses after so many steps, until they are too many: how many were noted.
std::size_t noted(Losses& losses, const std::vector<std::int64_t>& reached) {
  for (std::size_t i = 0; i < reached.size(); ++i) {
    const auto done = losses.note(Losses::with_another({losses.counts()}, reached[i]), kWhy);
    EXPECT_EQ(!done, losses.too_many());
    if (!done) return i + 1;
  }
  return reached.size();
}

TEST(Losses, TheThirdOfOneStepIsTooMuch) {
  Losses losses({});
  EXPECT_EQ(noted(losses, {5, 5, 5, 5}), 3U);
  const auto done = losses.note(losses.counts(), kWhy);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kPeerLost);
  EXPECT_EQ(done.error().message,
            "step 5 was lost 3 times, at last: rank 1 was lost: its process has ended");
}

TEST(Losses, OfStepsThatTheRunHasDoneSinceAreForgotten) {
  Losses losses({});
  EXPECT_EQ(noted(losses, {5, 5, 6, 6, 7, 9, 9, 12}), 8U);
  EXPECT_FALSE(losses.too_many());
  EXPECT_EQ(losses.counts(), (Losses::Counts{{12, 1}}));
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
  const Losses::Counts before = {{5, 2}, {8, 1}};
  EXPECT_EQ(Losses::with_another({{}, before, {{8, 2}}}, 5), (Losses::Counts{{5, 3}, {8, 2}}));
  EXPECT_EQ(Losses::with_another({}, 0), (Losses::Counts{{0, 1}}));
}

}  // namespace
}  // namespace dynmo::train
