// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/kernels/select_top.h"

namespace dynmo::kernels {
namespace {

// The largest sum over all assignments, by trying them.
double best_sum(const std::vector<double>& scores, std::int64_t experts, std::int64_t top_k) {
  const std::int64_t tokens = std::ssize(scores) / experts;
  const std::int64_t room = (tokens * top_k + experts - 1) / experts;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(experts));
  double best = -std::numeric_limits<double>::infinity();
  const std::function<void(std::int64_t, std::int64_t, std::int64_t, double)> place =
      [&](std::int64_t token, std::int64_t from, std::int64_t left, double sum) {
        if (token == tokens) {
          best = std::max(best, sum);
          return;
        }
        if (left == 0) return place(token + 1, 0, top_k, sum);
        for (std::int64_t e = from; e < experts; ++e) {
          auto& count = counts[static_cast<std::size_t>(e)];
          if (count == room) continue;
          ++count;
          place(token, e + 1, left - 1,
                sum + scores[static_cast<std::size_t>(token * experts + e)]);
          --count;
        }
      };
  place(0, 0, top_k, 0);
  return best;
}

// The sum, after what any assignment has to be.
double sum_of(const std::vector<double>& scores, std::int64_t experts, std::int64_t top_k,
              const std::string& what) {
  const std::int64_t tokens = std::ssize(scores) / experts;
  const auto chosen = balanced_assignment(scores, experts, top_k);
  EXPECT_EQ(std::ssize(chosen), tokens * top_k) << what;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(experts));
  double sum = 0;
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::int32_t last = -1;
    for (std::int64_t k = 0; k < top_k; ++k) {
      const std::int32_t e = chosen[static_cast<std::size_t>(token * top_k + k)];
      EXPECT_GT(e, last) << what;
      last = e;
      ++counts[static_cast<std::size_t>(e)];
      sum += scores[static_cast<std::size_t>(token * experts + e)];
    }
  }
  EXPECT_LE(*std::ranges::max_element(counts), (tokens * top_k + experts - 1) / experts) << what;
  return sum;
}

TEST(BalancedAssignment, IsTheBestOfAllOnSmallCases) {
  for (std::uint64_t seed = 0; seed < 1500; ++seed) {
    Rng rng(mix_key({0xBA5E, seed}));
    const auto experts = static_cast<std::int64_t>(1 + rng.below(4));
    const auto top_k = static_cast<std::int64_t>(
        1 + rng.below(static_cast<std::uint64_t>(std::min<std::int64_t>(experts, 3))));
    const auto tokens = static_cast<std::int64_t>(rng.below(7));
    const bool ties = rng.below(2) == 0;
    std::vector<double> scores;
    for (std::int64_t i = 0; i < tokens * experts; ++i) {
      scores.push_back(ties ? static_cast<double>(rng.below(3)) : rng.normal());
    }
    const std::string what = "seed " + std::to_string(seed);
    EXPECT_NEAR(sum_of(scores, experts, top_k, what), best_sum(scores, experts, top_k), 1e-12)
        << what;
    if (HasFailure()) return;
  }
}

// Linear programming's certificate for sizes that cannot be tried: no circle of moves gains.
TEST(BalancedAssignment, OfManyTokensCannotBeBetteredByMovesInACircle) {
  constexpr std::int64_t kExperts = 8;
  constexpr std::int64_t kTokens = 400;
  Rng rng(5);
  std::vector<double> scores;
  for (std::int64_t i = 0; i < kTokens * kExperts; ++i) {
    scores.push_back(rng.normal() + (i % kExperts == 0 ? 3 : 0));  // all would go to the first
  }
  for (const std::int64_t top_k : {1, 2, 5}) {
    (void)sum_of(scores, kExperts, top_k, "many");
    const auto chosen = balanced_assignment(scores, kExperts, top_k);
    std::vector<std::vector<double>> gain(
        kExperts, std::vector<double>(kExperts, -std::numeric_limits<double>::infinity()));
    for (std::int64_t token = 0; token < kTokens; ++token) {
      const auto first = chosen.begin() + token * top_k;
      const std::set<std::int32_t> own(first, first + top_k);
      for (const std::int32_t from : own) {
        for (std::int32_t to = 0; to < kExperts; ++to) {
          if (own.contains(to)) continue;
          auto& best = gain[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
          best = std::max(best, scores[static_cast<std::size_t>(token * kExperts + to)] -
                                    scores[static_cast<std::size_t>(token * kExperts + from)]);
        }
      }
    }
    for (std::size_t by = 0; by < kExperts; ++by) {
      for (std::size_t from = 0; from < kExperts; ++from) {
        for (std::size_t to = 0; to < kExperts; ++to) {
          gain[from][to] = std::max(gain[from][to], gain[from][by] + gain[by][to]);
        }
      }
    }
    for (std::size_t e = 0; e < kExperts; ++e) EXPECT_LE(gain[e][e], 1e-9) << top_k;
  }
}

TEST(BalancedAssignment, EndsWhateverTheScoresAre) {
  const double nothing = std::numeric_limits<double>::quiet_NaN();
  const double endless = std::numeric_limits<double>::infinity();
  Rng rng(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> scores;
    for (int i = 0; i < 12 * 4; ++i) {
      const double kinds[] = {nothing, endless, -endless, 1e300, 0.0, rng.normal()};
      scores.push_back(kinds[rng.below(6)]);
    }
    EXPECT_EQ(balanced_assignment(scores, 4, 2).size(), 24U);
    EXPECT_EQ(balanced_assignment(scores, 4, 2), balanced_assignment(scores, 4, 2));
  }
}

}  // namespace
}  // namespace dynmo::kernels
