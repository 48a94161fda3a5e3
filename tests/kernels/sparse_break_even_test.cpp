// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/sparse_break_even.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace dynmo::kernels {
namespace {

// Compressed products take so much of the dense time, whatever that is.
std::vector<ProductTimes> times(const std::vector<std::pair<double, double>>& shares) {
  std::vector<ProductTimes> all;
  for (const auto& [sparsity, share] : shares) {
    all.push_back({.sparsity = sparsity, .dense_s = 2e-3, .compressed_s = 2e-3 * share});
  }
  return all;
}

TEST(SparseBreakEven, LiesBetweenTheSparsitiesThatWereMeasured) {
  EXPECT_EQ(break_even(times({{0.3, 1.8}, {0.5, 1.2}, {0.7, 0.6}, {0.9, 0.2}})), 0.57);
  EXPECT_EQ(break_even(times({{0.5, 1}, {0.7, 0.5}})), 0.5);
}

// One lucky measurement at a low sparsity says nothing while a higher one is slower.
TEST(SparseBreakEven, IsWhereCompressedProductsStayFaster) {
  EXPECT_EQ(break_even(times({{0.3, 0.9}, {0.5, 1.5}, {0.7, 0.5}})), 0.6);
}

TEST(SparseBreakEven, StaysInsideWhatWasMeasuredOrIsNever) {
  EXPECT_EQ(break_even(times({{0.3, 0.9}, {0.9, 0.1}})), 0.3);
  EXPECT_EQ(break_even(times({{0.3, 2}, {0.9, 1.01}})), 1);
}

// Seconds as they are given, in order; the work is done.
Stopwatch scripted(std::vector<double> seconds, std::size_t* calls) {
  return [seconds = std::move(seconds), calls](const std::function<void()>& work) {
    work();
    return seconds.at((*calls)++);
  };
}

// Dense, then compressed at 45, 60, 75 and 90 %.
constexpr std::array kWarmingUp = {0.01, 0.01, 0.01, 0.01, 0.01};

std::vector<double> rounds(const std::vector<std::array<double, 5>>& counted) {
  std::vector<double> all(kWarmingUp.begin(), kWarmingUp.end());
  for (const auto& round : counted) all.insert(all.end(), round.begin(), round.end());
  return all;
}

// The first round is faster than all that count, and each number is the best of one round.
TEST(SparseBreakEven, IsOfTheBestRoundsBehindTheFirst) {
  std::size_t calls = 0;
  const std::vector<MatrixSize> one = {{.rows = 32, .columns = 48, .matrices = 4}};
  const auto seconds = rounds({{5, 9, 6, 2.5, 1}, {4, 7, 9, 9, 9}, {9, 9, 5, 3, 2}});
  EXPECT_EQ(
      measure_break_even(one, 20, scripted(seconds, &calls)),
      break_even(std::vector<ProductTimes>{{.sparsity = 0.45, .dense_s = 4, .compressed_s = 7},
                                           {.sparsity = 0.6, .dense_s = 4, .compressed_s = 5},
                                           {.sparsity = 0.75, .dense_s = 4, .compressed_s = 2.5},
                                           {.sparsity = 0.9, .dense_s = 4, .compressed_s = 1}}));
  EXPECT_EQ(calls, 20U);
}

// Sizes count by their number and, beyond 1024, by their weights: 1 x 2048 as two of 1 x 1024.
TEST(SparseBreakEven, IsOfAllSizesByTheirWeights) {
  const auto all = [&](double compressed_s) {
    // The sizes in order: [1, 1024], then [32, 48].
    std::vector<double> seconds =
        rounds({{1, compressed_s, 0.5, 0.5, 0.5}, {9, 9, 9, 9, 9}, {9, 9, 9, 9, 9}});
    const auto other = rounds({{1, 2, 0.5, 0.5, 0.5}, {9, 9, 9, 9, 9}, {9, 9, 9, 9, 9}});
    seconds.insert(seconds.end(), other.begin(), other.end());
    std::size_t calls = 0;
    const std::vector<MatrixSize> matrices = {{.rows = 32, .columns = 48, .matrices = 4},
                                              {.rows = 1, .columns = 2048}};
    const double found = measure_break_even(matrices, 20, scripted(seconds, &calls));
    EXPECT_EQ(calls, 40U);
    return found;
  };
  // Dense 4 x 1 + 2 x 1; compressed at 45 % 4 x 2 + 2 x s, at 60 % half of the dense time.
  EXPECT_EQ(all(0), 0.51);  // 8 against 6: 2 too much at 45 %, 3 less at 60 %: 2 / 5 of the way
  EXPECT_EQ(all(2), 0.55);  // 12 against 6: 6 / 9 of the way
}

}  // namespace
}  // namespace dynmo::kernels
