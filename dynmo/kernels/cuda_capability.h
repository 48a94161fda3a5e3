// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tells which kernels of libtorch a CUDA device has. libtorch's own interface for that needs the
// headers of CUDA.

#include <c10/core/Device.h>

namespace dynmo::kernels {

// Returns the major number of the device's compute capability: 9 for an H100. Asks the driver that
// libtorch has loaded. Returns 0 if there is none, or for another kind of device.
[[nodiscard]] int cuda_capability(at::Device device);

}  // namespace dynmo::kernels
