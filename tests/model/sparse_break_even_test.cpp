// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/sparse_break_even.h"

#include <gtest/gtest.h>

#include <vector>

namespace dynmo::model {
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

// The value depends on the machine and its load.
TEST(SparseBreakEven, IsAShareWhereverItIsMeasured) {
  const std::vector<MatrixSize> matrices = {{.rows = 32, .columns = 48, .matrices = 4},
                                            {.rows = 1, .columns = 1500}};
  const double found = measure_break_even(matrices, 20);
  EXPECT_GE(found, 0.45);
  EXPECT_LE(found, 1);
}

}  // namespace
}  // namespace dynmo::model
