// SPDX-License-Identifier: Apache-2.0
#pragma once

// Matrix products of plain memory by the BLAS inside libtorch, where at::mm would take longer to be
// called than the product takes (blocks of attention), or cannot do it (bf16 summed in fp32).

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>

#include <cstdint>

#include "dynmo/kernels/gemm.h"

namespace dynmo::kernels {

// A row-major matrix, or its transpose, whose rows lie `stride` elements apart.
template <typename Element>
struct MatrixView {
  const Element* data;
  std::int64_t stride;
  bool transposed = false;
};

struct ProductShape {
  std::int64_t rows;     // of the result, M
  std::int64_t columns;  // of the result, N
  std::int64_t depth;    // K
};

// Whether libtorch's library has these products: fp32 and fp64 with any BLAS, bf16 with MKL on a
// processor that multiplies bf16.
template <typename Element>
[[nodiscard]] bool has_products();

// c_MN = factor * a_MK b_KN + kept * c_MN, with c's rows `c_stride` apart. Requires has_products;
// `kept` 0 reads nothing of c. Sums of bf16 are fp32, their order MKL's.
void multiply(const ProductShape& shape, float factor, const MatrixView<float>& a,
              const MatrixView<float>& b, float kept, float* c, std::int64_t c_stride);
void multiply(const ProductShape& shape, double factor, const MatrixView<double>& a,
              const MatrixView<double>& b, double kept, double* c, std::int64_t c_stride);
void multiply(const ProductShape& shape, float factor, const MatrixView<c10::BFloat16>& a,
              const MatrixView<c10::BFloat16>& b, float kept, float* c, std::int64_t c_stride);

// sum_MN += a_KM^T b_KN of bf16 matrices on the CPU, into a contiguous fp32 one. Requires
// has_products<c10::BFloat16>().
void add_product(at::Tensor& sum_MN, const at::Tensor& a_KM, const at::Tensor& b_KN);

// Whether gemm.h's kernels take this product: of fp32 on the CPU, on a processor that wants
// them.
[[nodiscard]] bool has_own_product(const at::Tensor& a_MK, const at::Tensor& b_KN);

// c = a b, or c += a b, by those kernels on the threads of at::set_num_threads. Requires matrices
// of fp32 on the CPU, c of contiguous rows, and gemm::is_possible(). libtorch's profiler sees
// "dynmo::own_product".
void own_product(const at::Tensor& c_MN, const at::Tensor& a_MK, const at::Tensor& b_KN,
                 gemm::Result result);

}  // namespace dynmo::kernels
