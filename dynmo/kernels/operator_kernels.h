// SPDX-License-Identifier: Apache-2.0
#pragma once

// Asks which kernels libtorch has for a device. Some operators have one for CUDA, but none for the
// CPU. Others have one for some CUDA devices alone.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace dynmo::kernels {

// Returns whether the operator, such as "aten::mm", has a kernel of its own for x's device.
[[nodiscard]] bool has_kernel(const char* name, const at::Tensor& x);

// Returns the major number of the device's compute capability: 9 for an H100. Asks the driver that
// libtorch has loaded. Returns 0 if there is none, or for another kind of device.
[[nodiscard]] int cuda_capability(at::Device device);

}  // namespace dynmo::kernels
