// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/sparse_break_even.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <functional>
#include <tuple>
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

// Dense, then compressed at 45, 60, 75, 90 and 95 %, then at 90 % in blocks.
using Round = std::array<double, 7>;
constexpr std::size_t kCalls = 25 * std::tuple_size_v<Round>;

std::vector<double> rounds(const std::vector<Round>& counted) {
  std::vector<double> all(std::tuple_size_v<Round>, 0.01);  // warming up
  for (const Round& round : counted) all.insert(all.end(), round.begin(), round.end());
  all.resize(kCalls, 100);  // the rest of 25 rounds of a small matrix
  return all;
}

// The first round is faster than all that count, and each number is the best of one round.
TEST(SparseBreakEven, IsOfTheBestRoundsBehindTheFirst) {
  std::size_t calls = 0;
  const std::vector<MatrixSize> one = {{.rows = 32, .columns = 48, .matrices = 4}};
  const auto seconds =
      rounds({{5, 9, 6, 2.5, 1, 2, 7}, {4, 7, 9, 9, 9, 0.5, 8}, {9, 9, 5, 3, 2, 2, 9}});
  EXPECT_EQ(
      measure_break_even(one, 20, scripted(seconds, &calls)),
      break_even(std::vector<ProductTimes>{{.sparsity = 0.45, .dense_s = 4, .compressed_s = 7},
                                           {.sparsity = 0.6, .dense_s = 4, .compressed_s = 5},
                                           {.sparsity = 0.75, .dense_s = 4, .compressed_s = 2.5},
                                           {.sparsity = 0.9, .dense_s = 4, .compressed_s = 1},
                                           {.sparsity = 0.95, .dense_s = 4, .compressed_s = 0.5}}));
  EXPECT_EQ(calls, kCalls);
}

// Sizes count by their number and, beyond 1024, by their weights: 1 x 2048 as two of 1 x 1024.
TEST(SparseBreakEven, IsOfAllSizesByTheirWeights) {
  const auto all = [&](double compressed_s) {
    // The sizes in order: [1, 1024], then [32, 48].
    std::vector<double> seconds = rounds({{1, compressed_s, 0.5, 0.5, 0.5, 0.5, 0.5}});
    const auto other = rounds({{1, 2, 0.5, 0.5, 0.5, 0.5, 0.5}});
    seconds.insert(seconds.end(), other.begin(), other.end());
    std::size_t calls = 0;
    const std::vector<MatrixSize> matrices = {{.rows = 32, .columns = 48, .matrices = 4},
                                              {.rows = 1, .columns = 2048}};
    const double found = measure_break_even(matrices, 20, scripted(seconds, &calls));
    EXPECT_EQ(calls, 2 * kCalls);
    return found;
  };
  // Dense 4 x 1 + 2 x 1; compressed at 45 % 4 x 2 + 2 x s, at 60 % half of the dense time.
  EXPECT_EQ(all(0), 0.51);  // 8 against 6: 2 too much at 45 %, 3 less at 60 %: 2 / 5 of the way
  EXPECT_EQ(all(2), 0.55);  // 12 against 6: 6 / 9 of the way
}

// A processor whose products take what some coefficients say: those are found, from several sizes
// of matrices that have unlike shares of their segments left.
TEST(SparseBreakEven, TheFitHasTheCoefficientsOfProductsThatTakeNoOtherTime) {
  const cost::ProductFit truth{.fixed = 0.04, .weights = 1.7, .segments = 0.06};
  const std::vector<MatrixSize> matrices = {{.rows = 150, .columns = 400, .matrices = 3},
                                            {.rows = 400, .columns = 200}};
  // Once to see what is left of each size: dense products of the first take 2 s, of the second 5.
  std::vector<double> seconds;
  std::vector<cost::Occupancy> left;
  for (const MatrixSize& size : matrices) {
    std::size_t calls = 0;
    const auto found =
        measure_products(std::vector<MatrixSize>{{.rows = size.rows, .columns = size.columns}}, 20,
                         scripted(std::vector<double>(kCalls, 1), &calls));
    ASSERT_EQ(found.size(), 6U);
    const double dense = size.rows == 150 ? 2 : 5;
    Round round = {dense};
    for (std::size_t i = 0; i < found.size(); ++i) {
      left.push_back(found[i].left);
      round[i + 1] = dense * truth.time(found[i].left);
      EXPECT_NEAR(found[i].left.weights, 1 - found[i].sparsity, i == 5 ? 0.04 : 0.01);
    }
    const auto all = rounds({round, round, round});
    seconds.insert(seconds.end(), all.begin(), all.end());
  }
  EXPECT_GT(left[0].segments, 0.999);
  EXPECT_LT(left[5].segments, 0.75);
  std::size_t calls = 0;
  const auto times = measure_products(matrices, 20, scripted(seconds, &calls));
  EXPECT_EQ(calls, 2 * kCalls);
  const cost::ProductFit found = product_fit(times);
  EXPECT_NEAR(found.fixed, truth.fixed, 1e-9);
  EXPECT_NEAR(found.weights, truth.weights, 1e-9);
  EXPECT_NEAR(found.segments, truth.segments, 1e-9);
}

TEST(SparseBreakEven, LargeMatricesAreMeasuredInFourRounds) {
  std::size_t calls = 0;
  static_cast<void>(measure_products(std::vector<MatrixSize>{{.rows = 2000, .columns = 1024}}, 512,
                                     [&](const std::function<void()>&) {
                                       ++calls;
                                       return 1.0;
                                     }));
  EXPECT_EQ(calls, 4 * std::tuple_size_v<Round>);
}

}  // namespace
}  // namespace dynmo::kernels
