// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/select_top.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"

namespace dynmo::kernels {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
using Indices = std::vector<std::int64_t>;

// A stable sort by falling scores leaves ties in the order of their indices.
Indices by_full_sort(const std::vector<float>& scores, std::int64_t count) {
  Indices order;
  for (std::int64_t i = 0; i < std::ssize(scores); ++i) order.push_back(i);
  const auto key = [&](std::int64_t i) {
    const float score = scores[static_cast<std::size_t>(i)];
    return std::isnan(score) ? -std::numeric_limits<double>::max() : static_cast<double>(score);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return key(a) > key(b); });
  order.resize(static_cast<std::size_t>(count));
  std::sort(order.begin(), order.end());
  return order;
}

TEST(SelectTop, IsThatOfAFullSortWithManyTies) {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    Rng rng(mix_key({0x546F70, seed}));
    std::vector<float> scores(rng.below(80));
    const std::uint64_t values = 1 + rng.below(12);
    for (float& score : scores) {
      score = static_cast<float>(rng.below(values)) - 3;
      if (rng.below(20) == 0) score = kNaN;
      if (rng.below(30) == 0) score = -0.0F;
    }
    const auto count = static_cast<std::int64_t>(rng.below(scores.size() + 1));
    ASSERT_EQ(select_top(scores, count), by_full_sort(scores, count)) << "seed " << seed;
  }
}

TEST(SelectTop, TakesTheLowestIndicesOfEqualScoresAndNumbersBeforeAllElse) {
  EXPECT_EQ(select_top(std::vector<float>(6, 1.5F), 3), (Indices{0, 1, 2}));
  EXPECT_EQ(select_top(std::vector<float>{0.0F, -0.0F, 0.0F}, 2), (Indices{0, 1}));
  EXPECT_EQ(select_top(std::vector<float>{kNaN, -7, kNaN, 2}, 2), (Indices{1, 3}));
  EXPECT_EQ(select_top(std::vector<float>{kNaN, kNaN, 1}, 2), (Indices{0, 2}));
  EXPECT_TRUE(select_top(std::vector<float>{}, 0).empty());
  EXPECT_THROW(static_cast<void>(select_top(std::vector<float>{1}, 2)), CheckFailure);
}

}  // namespace
}  // namespace dynmo::kernels
