// SPDX-License-Identifier: Apache-2.0
#pragma once

// Asks libtorch whether an operator has a kernel for a kind of device. Some operators have one for
// CUDA, but none for the CPU.

#include <ATen/core/Tensor.h>

namespace dynmo::kernels {

// Returns whether the operator, such as "aten::mm", has a kernel of its own for x's device.
[[nodiscard]] bool has_kernel(const char* name, const at::Tensor& x);

}  // namespace dynmo::kernels
