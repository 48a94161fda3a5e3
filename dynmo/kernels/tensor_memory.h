// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory of a layer's state in one run of addresses. So its tensors need few messages, and fill
// large pages, for which most tensors alone are too small.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace dynmo::kernels {

// Allocates fp32 tensors of these shapes, in this order in memory, each at a multiple of 64 bytes.
// No gap is between two tensors if the first has a multiple of 64 bytes. Values are unspecified,
// except that the last `zeros` tensors are zero.
//
// The run is freed with its last tensor. A large tensor returns its pages when it is freed. Memory
// that is not written yet may not be backed by pages; see back_memory().
[[nodiscard]] std::vector<at::Tensor> allocate_together(
    const std::vector<std::vector<std::int64_t>>& shapes, std::size_t zeros = 0);

// Makes the system back the tensor's memory with pages now, and leaves its content. Best effort.
void back_memory(const at::Tensor& tensor);

}  // namespace dynmo::kernels
