// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of fp32 matrices for processors that multiply 512 bits at a time and to which MKL gives
// kernels of 256: AMD's from Zen 5 on (Zen 4 does 512 bits in two halves). Includes no header of
// libtorch.
//
// 32 columns of b at a time are copied into a panel that stays in the first cache; 12 rows of a at
// a time are multiplied with it, in 24 vectors of running sums. A sum goes by the depth in order,
// in pieces of a length that the depth alone decides: an element's bits depend neither on the
// other rows and columns nor on the threads.

#include <cstdint>

namespace dynmo::kernels::gemm {

// Whether this processor is such a one.
[[nodiscard]] bool is_wanted();
// Whether it can run them at all.
[[nodiscard]] bool is_possible();

// A row-major matrix, or the transpose of one, whose rows lie `stride` elements apart.
struct Operand {
  const float* data;
  std::int64_t stride;
  bool transposed = false;
};

// Rows and columns of the result; the whole, or a thread's part.
struct Range {
  std::int64_t first_row, end_row;
  std::int64_t first_column, end_column;
};

enum class Result { kSet, kAddTo };

// Part of c = a b, or of c += a b. Requires is_possible(); a part that begins at a multiple of
// kColumns columns.
inline constexpr std::int64_t kColumns = 32;
void multiply(const Range& part, std::int64_t depth, const Operand& a, const Operand& b,
              Result result, float* c, std::int64_t c_stride);

}  // namespace dynmo::kernels::gemm
