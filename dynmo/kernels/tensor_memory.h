// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory of a layer's state in one run. Tensors behind one another travel in few messages, and on
// large pages: most tensors are smaller than one of those, a layer is not.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace dynmo::kernels {

// fp32 tensors of these shapes, in this order in memory, each at a multiple of 64 bytes. Nothing
// lies between two of them where the bytes of the first are such a multiple. Values are
// unspecified, but those of the last `zeros` tensors are zero.
//
// The run is freed with its last tensor. A large tensor that goes before the others gives its pages
// back at once. Memory that is not written yet need not be backed; see back_memory.
[[nodiscard]] std::vector<at::Tensor> allocate_together(
    const std::vector<std::vector<std::int64_t>>& shapes, std::size_t zeros = 0);

// Has the system back the tensor's memory now, and leaves what is in it; best effort.
void back_memory(const at::Tensor& tensor);

}  // namespace dynmo::kernels
