// SPDX-License-Identifier: Apache-2.0
// Autocast on the strict device: the operators that CUDA runs in low precision, or in fp32.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

// The macros of libtorch name what is in this namespace.
namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define DYNMO_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define DYNMO_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define DYNMO_FP32_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define DYNMO_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(DYNMO_LOW)
  AT_FORALL_FP32(DYNMO_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(DYNMO_FP32_SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(DYNMO_WIDEST)
}

}  // namespace at::autocast
