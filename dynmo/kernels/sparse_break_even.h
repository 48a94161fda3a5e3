// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures products with a compressed matrix relative to dense ones, and the sparsity from which on
// they take less time. It depends on the processor, its BLAS, the sizes of the matrices and the
// number of threads.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "dynmo/cost/product_fit.h"

namespace dynmo::kernels {

// A number of equal matrices [rows, columns] of a model.
struct MatrixSize {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int matrices = 1;
};

// The times that the three products of a training took with all matrices, dense and compressed.
struct ProductTimes {
  double sparsity = 0;        // approximate, of weights spread evenly
  cost::Occupancy left = {};  // counted
  double dense_s = 0;
  double compressed_s = 0;
};

// Does the work and returns its duration in seconds.
using Stopwatch = std::function<double(const std::function<void()>& work)>;
// Measures processor time if there is one thread, because other programs hardly lengthen it.
// Otherwise measures wall time.
[[nodiscard]] double by_the_clock(const std::function<void()>& work);

// Measures fp32 products of `tokens` tokens, with this thread's number of threads. Weights are
// spread evenly at 45, 60, 75, 90 and 95 %, then at 90 % in an eighth of the 32 x 32 blocks. The
// results are in that order.
//
// Takes seconds at most. Sizes beyond 1024 and tokens beyond 512 are cut to these numbers, because
// the ratio hardly changes beyond them. No two calls give the same result, so one call must decide
// for all ranks.
//
// For each size of matrices the stopwatch is called in 4 rounds, and for small sizes in up to 25. A
// round measures dense products, then compressed ones in the order above. The first round does not
// count. The best time of each is taken.
[[nodiscard]] std::vector<ProductTimes> measure_products(std::span<const MatrixSize> matrices,
                                                         std::int64_t tokens,
                                                         const Stopwatch& seconds = by_the_clock);

// Returns the lowest sparsity from which on compressed products take no longer than dense ones.
// Returns 1 if they take longer at the last of `times`. The result is interpolated linearly between
// two of `times` and rounded to two digits. Requires ascending sparsities.
[[nodiscard]] double break_even(std::span<const ProductTimes> times);
// Measures the break-even of weights spread evenly. The result is 1 or between 0.45 and 0.95. From
// 0.45 on, compressed matrices take less memory.
[[nodiscard]] double measure_break_even(std::span<const MatrixSize> matrices, std::int64_t tokens,
                                        const Stopwatch& seconds = by_the_clock);

// Fits the time of products as a function of what is left of a matrix.
[[nodiscard]] cost::ProductFit product_fit(std::span<const ProductTimes> times);

}  // namespace dynmo::kernels
