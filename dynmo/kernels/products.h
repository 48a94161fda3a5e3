// SPDX-License-Identifier: Apache-2.0
#pragma once

// Matrix products of plain memory by the BLAS inside libtorch. They serve two cases. For blocks of
// attention, a call of at::mm would take longer than the product. at::mm cannot sum bf16 in fp32.

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>

#include <cstdint>

#include "dynmo/kernels/gemm.h"

namespace dynmo::kernels {

struct ProductShape {
  std::int64_t rows;     // M, of the result
  std::int64_t columns;  // N, of the result
  std::int64_t depth;    // K
};

// Returns whether libtorch's library has products of matrices of this type. It has fp32 and fp64
// with any BLAS. It has bf16 with MKL on a processor that multiplies bf16.
template <typename Element>
[[nodiscard]] bool has_products();
template <>
bool has_products<float>();
template <>
bool has_products<double>();
template <>
bool has_products<c10::BFloat16>();

// Computes c_MN = factor * a_MK b_KN + kept * c_MN. Rows of c start `c_stride` apart. If `kept` is
// 0, nothing of c is read. Sums of bf16 are fp32, in MKL's order. Requires has_products.
void multiply(const ProductShape& shape, float factor, const MatrixView<float>& a,
              const MatrixView<float>& b, float kept, float* c, std::int64_t c_stride);
void multiply(const ProductShape& shape, double factor, const MatrixView<double>& a,
              const MatrixView<double>& b, double kept, double* c, std::int64_t c_stride);
void multiply(const ProductShape& shape, float factor, const MatrixView<c10::BFloat16>& a,
              const MatrixView<c10::BFloat16>& b, float kept, float* c, std::int64_t c_stride);

// Adds a_KM^T b_KN of bf16 matrices to a contiguous fp32 matrix, on the CPU. Requires
// has_products<c10::BFloat16>().
void add_product(at::Tensor& sum_MN, const at::Tensor& a_KM, const at::Tensor& b_KN);

// Returns whether gemm.h's kernels take this product: fp32 on the CPU, and a processor on which
// gemm::is_wanted().
[[nodiscard]] bool has_own_product(const at::Tensor& a_MK, const at::Tensor& b_KN);

// Computes c = a b, or c += a b, by gemm.h's kernels on the threads of at::set_num_threads.
// libtorch's profiler sees "dynmo::own_product". Requires matrices of fp32 on the CPU, contiguous
// rows of c, and gemm::is_possible().
void own_product(const at::Tensor& c_MN, const at::Tensor& a_MK, const at::Tensor& b_KN,
                 gemm::Result result);

}  // namespace dynmo::kernels
