// SPDX-License-Identifier: Apache-2.0
#pragma once

// From which sparsity on a compressed matrix is multiplied with in less time than a dense one: it
// depends on the processor, its BLAS, the sizes of the matrices and the number of threads.

#include <cstdint>
#include <functional>
#include <span>

namespace dynmo::kernels {

// So many matrices [rows, columns] of a model.
struct MatrixSize {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int matrices = 1;
};

// The times that the three products of a training took with all matrices, dense and compressed.
struct ProductTimes {
  double sparsity = 0;
  double dense_s = 0;
  double compressed_s = 0;
};

// The lowest sparsity from which on compressed products take no longer at any of `times`, whose
// sparsities ascend: linear between two of them, to two digits. 1: not even at the last.
[[nodiscard]] double break_even(std::span<const ProductTimes> times);

// The same measured here and now at 45 to 90 %, in fp32 for so many tokens, with this thread's
// number of threads: 0.45, from where compressed matrices take less memory, to 0.9, or 1.
// Matrices and tokens beyond 1024 and 512 are taken as that, as the ratio hardly changes from there
// on: seconds at most. No two calls give the same: one of them decides for all ranks.
[[nodiscard]] double measure_break_even(std::span<const MatrixSize> matrices, std::int64_t tokens);
// The same by a stopwatch that does the work it is given and says how many seconds that took. For
// each size of matrices it is called in four rounds, the first of which does not count: dense, then
// compressed at 45, 60, 75 and 90 %.
using Stopwatch = std::function<double(const std::function<void()>& work)>;
[[nodiscard]] double measure_break_even(std::span<const MatrixSize> matrices, std::int64_t tokens,
                                        const Stopwatch& seconds);

}  // namespace dynmo::kernels
