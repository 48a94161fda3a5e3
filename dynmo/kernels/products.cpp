// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/products.h"

#include <ATen/ATen.h>
#include <ATen/Version.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/kernels/parallel_impl.h"
#include "dynmo/kernels/processor.h"

// libtorch_cpu.so exports these functions of its BLAS, with Fortran's interface: columns first,
// 32-bit sizes. They are weak, because a libtorch without MKL has no product of bf16.
extern "C" {
[[gnu::weak]] void sgemm_(const char* a_form, const char* b_form, const std::int32_t* m,
                          const std::int32_t* n, const std::int32_t* k, const float* alpha,
                          const float* a, const std::int32_t* a_stride, const float* b,
                          const std::int32_t* b_stride, const float* beta, float* c,
                          const std::int32_t* c_stride);
[[gnu::weak]] void dgemm_(const char* a_form, const char* b_form, const std::int32_t* m,
                          const std::int32_t* n, const std::int32_t* k, const double* alpha,
                          const double* a, const std::int32_t* a_stride, const double* b,
                          const std::int32_t* b_stride, const double* beta, double* c,
                          const std::int32_t* c_stride);
[[gnu::weak]] void gemm_bf16bf16f32_(const char* a_form, const char* b_form, const std::int32_t* m,
                                     const std::int32_t* n, const std::int32_t* k,
                                     const float* alpha, const c10::BFloat16* a,
                                     const std::int32_t* a_stride, const c10::BFloat16* b,
                                     const std::int32_t* b_stride, const float* beta, float* c,
                                     const std::int32_t* c_stride);
}

namespace dynmo::kernels {
namespace {

std::int32_t narrow(std::int64_t size) {
  DYNMO_CHECK(size >= 0 && size <= INT32_MAX, "sizes of a product below 2^31, got {}", size);
  return static_cast<std::int32_t>(size);
}

// Calls a product. It is columns first, so the rows of c are columns: c^T = b^T a^T.
template <typename Function, typename Element, typename Sum>
void call(Function function, const ProductShape& shape, Sum factor, const MatrixView<Element>& a,
          const MatrixView<Element>& b, Sum kept, Sum* c, std::int64_t c_stride) {
  const char a_form = a.transposed ? 'T' : 'N';
  const char b_form = b.transposed ? 'T' : 'N';
  const std::int32_t m = narrow(shape.rows);
  const std::int32_t n = narrow(shape.columns);
  const std::int32_t k = narrow(shape.depth);
  const std::int32_t lda = narrow(a.stride);
  const std::int32_t ldb = narrow(b.stride);
  const std::int32_t ldc = narrow(c_stride);
  function(&b_form, &a_form, &n, &m, &k, &factor, b.data, &ldb, a.data, &lda, &kept, c, &ldc);
}

// Returns x itself if its rows or columns are contiguous, or else a contiguous copy.
at::Tensor rows_or_columns(const at::Tensor& x) {
  return x.stride(0) == 1 || x.stride(1) == 1 ? x : x.contiguous();
}

MatrixView<float> operand_of(const at::Tensor& x) {
  const bool transposed = x.stride(1) != 1;
  return {x.const_data_ptr<float>(), x.stride(transposed ? 1 : 0), transposed};
}

// Returns the minimum number of rows or panels of a thread, for a million multiply-adds.
std::int64_t units_at_once(std::int64_t work_of_one) {
  constexpr std::int64_t kWork = 1 << 20;
  return std::max<std::int64_t>(kWork / std::max<std::int64_t>(work_of_one, 1), 1);
}

}  // namespace

template <>
bool has_products<float>() {
  return sgemm_ != nullptr;
}
template <>
bool has_products<double>() {
  return dgemm_ != nullptr;
}
template <>
bool has_products<c10::BFloat16>() {
#if defined(__x86_64__)
  // Without the instruction, MKL emulates the product, far slower than libtorch's other operations.
  return gemm_bf16bf16f32_ != nullptr && __builtin_cpu_supports("avx512bf16") != 0;
#else
  return gemm_bf16bf16f32_ != nullptr;
#endif
}

void multiply(const ProductShape& shape, float factor, const MatrixView<float>& a,
              const MatrixView<float>& b, float kept, float* c, std::int64_t c_stride) {
  call(sgemm_, shape, factor, a, b, kept, c, c_stride);
}

void multiply(const ProductShape& shape, double factor, const MatrixView<double>& a,
              const MatrixView<double>& b, double kept, double* c, std::int64_t c_stride) {
  call(dgemm_, shape, factor, a, b, kept, c, c_stride);
}

void multiply(const ProductShape& shape, float factor, const MatrixView<c10::BFloat16>& a,
              const MatrixView<c10::BFloat16>& b, float kept, float* c, std::int64_t c_stride) {
  call(gemm_bf16bf16f32_, shape, factor, a, b, kept, c, c_stride);
}

void add_product(at::Tensor& sum_MN, const at::Tensor& a_KM, const at::Tensor& b_KN) {
  DYNMO_CHECK(sum_MN.is_contiguous() && a_KM.size(0) == b_KN.size(0) &&
                  sum_MN.size(0) == a_KM.size(1) && sum_MN.size(1) == b_KN.size(1),
              "matrices that fit, got {} += ({})^T {}", fmt::join(sum_MN.sizes(), "x"),
              fmt::join(a_KM.sizes(), "x"), fmt::join(b_KN.sizes(), "x"));
  const at::Tensor a = a_KM.stride(1) == 1 ? a_KM : a_KM.contiguous();
  const at::Tensor b = b_KN.stride(1) == 1 ? b_KN : b_KN.contiguous();
  multiply({sum_MN.size(0), sum_MN.size(1), a.size(0)}, 1.0F,
           {a.const_data_ptr<c10::BFloat16>(), a.stride(0), true},
           {b.const_data_ptr<c10::BFloat16>(), b.stride(0)}, 1.0F, sum_MN.data_ptr<float>(),
           sum_MN.size(1));
}

std::string instruction_set_name() {
  std::string name = at::get_cpu_capability();
#if defined(__x86_64__) && defined(__GNUC__)
  // MKL's code depends on the maker, too.
  std::string features = __builtin_cpu_is("intel") != 0 ? "intel"
                         : __builtin_cpu_is("amd") != 0 ? "amd"
                                                        : "another maker";
  if (__builtin_cpu_supports("avx2") != 0) features += " avx2";
  if (__builtin_cpu_supports("fma") != 0) features += " fma";
  if (__builtin_cpu_supports("avx512f") != 0) features += " avx512f";
  if (__builtin_cpu_supports("avx512bf16") != 0) features += " avx512bf16";
  name += fmt::format(" ({})", features);
#endif
  return name + (gemm::is_wanted() ? ", own products" : "");
}

bool has_own_product(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  return gemm::is_wanted() && a_MK.is_cpu() && a_MK.scalar_type() == at::kFloat &&
         b_KN.scalar_type() == at::kFloat;
}

void own_product(const at::Tensor& c_MN, const at::Tensor& a_MK, const at::Tensor& b_KN,
                 gemm::Result result) {
  RECORD_FUNCTION("dynmo::own_product", std::vector<c10::IValue>({a_MK, b_KN}));
  const std::int64_t rows = c_MN.size(0);
  const std::int64_t columns = c_MN.size(1);
  const std::int64_t depth = a_MK.size(1);
  DYNMO_CHECK(c_MN.stride(1) == 1 && a_MK.size(0) == rows && b_KN.size(0) == depth &&
                  b_KN.size(1) == columns,
              "matrices that fit, got {} of {} by {}", fmt::join(c_MN.sizes(), "x"),
              fmt::join(a_MK.sizes(), "x"), fmt::join(b_KN.sizes(), "x"));
  // These tensors keep the elements alive.
  const at::Tensor a = rows_or_columns(a_MK);
  const at::Tensor b = rows_or_columns(b_KN);
  const MatrixView<float> left = operand_of(a);
  const MatrixView<float> right = operand_of(b);
  auto* sum = c_MN.mutable_data_ptr<float>();
  const auto run = [&](const gemm::Range& part) {
    gemm::multiply(part, depth, left, right, result, sum, c_MN.stride(0));
  };
  // Threads divide rows or columns, whichever are more.
  if (rows > columns) {
    at::parallel_for(0, rows, units_at_once(columns * depth),
                     [&](std::int64_t begin, std::int64_t end) {
                       run({begin, end, 0, columns});
                     });
    return;
  }
  const std::int64_t panels = (columns + gemm::kColumns - 1) / gemm::kColumns;
  at::parallel_for(
      0, panels, units_at_once(rows * gemm::kColumns * depth),
      [&](std::int64_t begin, std::int64_t end) {
        run({0, rows, begin * gemm::kColumns, std::min(end * gemm::kColumns, columns)});
      });
}

}  // namespace dynmo::kernels
