// SPDX-License-Identifier: Apache-2.0
#pragma once

// Times of products with a compressed matrix relative to dense ones, and from which sparsity on
// they are less: that depends on the processor, its BLAS, the sizes of the matrices and the number
// of threads.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "dynmo/cost/product_fit.h"

namespace dynmo::kernels {

// So many matrices [rows, columns] of a model.
struct MatrixSize {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int matrices = 1;
};

// The times that the three products of a training took with all matrices, dense and compressed.
struct ProductTimes {
  double sparsity = 0;        // about; of weights spread evenly
  cost::Occupancy left = {};  // counted
  double dense_s = 0;
  double compressed_s = 0;
};

// Does the work that it is given and says how many seconds that took.
using Stopwatch = std::function<double(const std::function<void()>& work)>;
// With one thread the time of the processor, which other programs hardly lengthen; else wall time.
[[nodiscard]] double by_the_clock(const std::function<void()>& work);

// Measures products here and now in fp32 for so many tokens, with this thread's number of threads:
// with weights spread evenly at 45, 60, 75, 90 and 95 %, and at 90 % in an eighth of the blocks of
// 32 x 32, in that order. Matrices and tokens beyond 1024 and 512 are taken as that, as the ratio
// hardly changes from there on: seconds at most. No two calls give the same: one of them decides
// for all ranks.
// For each size of matrices the stopwatch is called in 4 rounds, of small ones in up to 25: dense,
// then compressed in the order above. The first round does not count, and the best of each is
// taken.
[[nodiscard]] std::vector<ProductTimes> measure_products(std::span<const MatrixSize> matrices,
                                                         std::int64_t tokens,
                                                         const Stopwatch& seconds = by_the_clock);

// The lowest sparsity from which on compressed products take no longer at any of `times`, whose
// sparsities ascend: linear between two of them, to two digits. 1: not even at the last.
[[nodiscard]] double break_even(std::span<const ProductTimes> times);
// The same measured where weights are spread evenly: 0.45, from where compressed matrices take less
// memory, to 0.95, or 1.
[[nodiscard]] double measure_break_even(std::span<const MatrixSize> matrices, std::int64_t tokens,
                                        const Stopwatch& seconds = by_the_clock);

// Fits to `times` how long products take by what is left of a matrix.
[[nodiscard]] cost::ProductFit product_fit(std::span<const ProductTimes> times);

}  // namespace dynmo::kernels
