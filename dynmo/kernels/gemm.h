// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of fp32 matrices for processors that multiply 512 bits at a time, but to which MKL gives
// kernels of 256 bits. These are AMD's from Zen 5 on. (Zen 4 multiplies 512 bits in two halves.)
// Includes no header of libtorch.
//
// 32 columns of b are copied at a time into a panel that stays in the first cache. 12 rows of a are
// multiplied with it at a time, in 24 vectors of running sums. A sum adds the depth in order, in
// pieces whose length depends on the depth alone. So an element's bits do not depend on other rows,
// other columns or the threads.

#include <cstdint>

namespace dynmo::kernels {

// A row-major matrix, or its transpose, whose rows start `stride` elements apart.
template <typename Element>
struct MatrixView {
  const Element* data;
  std::int64_t stride;
  bool transposed = false;
};

}  // namespace dynmo::kernels

namespace dynmo::kernels::gemm {

// Returns whether these kernels are to be used on this processor, because they were written for it.
[[nodiscard]] bool is_wanted();
// Returns whether this processor can run these kernels.
[[nodiscard]] bool is_possible();

// Rows and columns of the result: all of them, or those of one thread.
struct Range {
  std::int64_t first_row, end_row;
  std::int64_t first_column, end_column;
};

enum class Result { kSet, kAddTo };

// Computes part of c = a b, or of c += a b. Requires is_possible(), and a part that begins at a
// multiple of kColumns columns.
inline constexpr std::int64_t kColumns = 32;
void multiply(const Range& part, std::int64_t depth, const MatrixView<float>& a,
              const MatrixView<float>& b, Result result, float* c, std::int64_t c_stride);

}  // namespace dynmo::kernels::gemm
