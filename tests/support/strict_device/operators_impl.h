// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tensors of the strict device, for its fallback and its own operators.

#include <ATen/core/Tensor.h>

#include "machine_impl.h"

namespace torch {
class Library;
}

namespace dynmo::strict {

[[nodiscard]] bool is_ours(const at::Tensor& tensor);
// Returns a tensor of the CPU with the bytes of `tensor`, where the device finds them.
[[nodiscard]] at::Tensor opened(const at::Tensor& tensor);
// Returns nullptr for a tensor without memory.
[[nodiscard]] Block* block_of(const at::Tensor& tensor);

// Registers the operators that are no kernel of the CPU's on the same bytes.
void register_own(torch::Library& library);
// Registers those that CUDA has and the CPU lacks, or has in another form.
void register_fused(torch::Library& library);

}  // namespace dynmo::strict
