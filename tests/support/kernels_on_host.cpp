// SPDX-License-Identifier: Apache-2.0
// Compiled without contraction, as devices compile it.
#include "tests/support/kernels_on_host.h"

#include <math.h>  // which names fmaf and sqrtf as devices do

#include <map>
#include <string_view>
#include <tuple>
#include <utility>

namespace dynmo::testing {
namespace {

using kernels::device::kThreads;

// The number of the block that runs.
thread_local long long current_block = 0;

#define DYNMO_INLINE inline
#define KERNEL void
#define SHARED static thread_local
#define BLOCK current_block
#define EACH(i, count) for (long long i = 0; i < (count); ++i)
#define EACH_OF_BLOCK(i, count) for (int i = 0; i < (count); ++i)
#define PHASE(thread) for (int thread = 0; thread < kThreads; ++thread)
// clang-format off
#include "dynmo/kernels/exponential_impl.h"
#include "dynmo/kernels/device/kernels.cu"
// clang-format on

// Calls a kernel with the values that the pointers show, once a block.
template <typename... Parameters, std::size_t... i>
void call_blocks(void (*kernel)(Parameters...), void** pointers, long long blocks,
                 std::index_sequence<i...>) {
  for (current_block = 0; current_block < blocks; ++current_block) {
    kernel(*static_cast<std::remove_cv_t<Parameters>*>(pointers[i])...);
  }
}
template <typename... Parameters>
std::function<void(void**, long long)> callable(void (*kernel)(Parameters...)) {
  return [kernel](void** pointers, long long blocks) {
    call_blocks(kernel, pointers, blocks, std::index_sequence_for<Parameters...>());
  };
}

struct HostKernel {
  std::function<void(void**, long long)> run;
  bool one_block = false;  // it shares its elements out itself
};

const std::map<std::string_view, HostKernel>& host_kernels() {
  static const std::map<std::string_view, HostKernel> kAll = {
      {"swiglu_float", {callable(swiglu_float), true}},
      {"swiglu_bf16", {callable(swiglu_bf16), true}},
      {"swiglu_gradient_float", {callable(swiglu_gradient_float), true}},
      {"swiglu_gradient_bf16", {callable(swiglu_gradient_bf16), true}},
      {"rotate_float", {callable(rotate_float)}},
      {"rotate_bf16", {callable(rotate_bf16)}},
      {"norm_gradient_float", {callable(norm_gradient_float)}},
      {"norm_gradient_bf16", {callable(norm_gradient_bf16)}},
      {"norm_weight_gradient_float", {callable(norm_weight_gradient_float), true}},
      {"norm_weight_gradient_bf16", {callable(norm_weight_gradient_bf16), true}},
      {"cross_entropy_float", {callable(cross_entropy_float)}},
      {"cross_entropy_bf16", {callable(cross_entropy_bf16)}},
      {"cross_entropy_gradient_float", {callable(cross_entropy_gradient_float)}},
      {"cross_entropy_gradient_bf16", {callable(cross_entropy_gradient_bf16)}},
      {"keep_mask", {callable(keep_mask), true}},
      {"adamw", {callable(adamw), true}},
  };
  return kAll;
}

void launch_on_host(const kernels::device::Call& call) {
  kernels::device::Packed arguments =
      kernels::device::packed(call, [](const kernels::device::Operand& operand) -> void* {
        return operand.written ? operand.tensor.mutable_data_ptr()
                               : const_cast<void*>(operand.tensor.const_data_ptr());
      });
  run_kernel_on_host(call, arguments.pointers.data());
}

}  // namespace

void run_kernel_on_host(const kernels::device::Call& call, void** pointers) {
  const HostKernel& kernel = host_kernels().at(call.kernel);
  kernel.run(pointers, kernel.one_block ? 1 : call.blocks);
}

void set_launcher_of_host() {
  kernels::device::set_launcher(
      at::kCPU, {.why_not = [](at::Device) { return std::string(); }, .launch = &launch_on_host});
}

}  // namespace dynmo::testing
