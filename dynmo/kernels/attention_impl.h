// SPDX-License-Identifier: Apache-2.0
#pragma once

// Causal attention on the CPU, a head at a time, its rows block by block: two products forward,
// five backward, and one pass over the scores between them. A row sees the keys up to its own
// position, so a block works on no more keys than its last row sees (ragged_attention.h is the same
// for rows that do not lie together). Probabilities exist for one
// block at a time; the gradient makes them again from the logarithm of their sum (Dao et al.,
// "FlashAttention", 2022). A head is one thread's: results do not depend on the number of threads.

#include <c10/core/ScalarType.h>

#include "dynmo/kernels/operations.h"

namespace dynmo::kernels {

// Whether libtorch's BLAS has the products of this type that these need.
[[nodiscard]] bool has_blocked_attention(at::ScalarType type);
// The type itself where it has them, else fp32.
[[nodiscard]] at::ScalarType product_type(at::ScalarType type);

// As causal_attention and its gradient, for CPU tensors. Tensors may have any strides but for K,
// which must lie together; results are contiguous.
[[nodiscard]] Attention blocked_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                                          const at::Tensor& v_BTHK);
[[nodiscard]] AttentionGradient blocked_attention_gradient(const at::Tensor& gradient_BTHK,
                                                           const at::Tensor& q_BTHK,
                                                           const at::Tensor& k_BTHK,
                                                           const at::Tensor& v_BTHK,
                                                           const Attention& attention);

}  // namespace dynmo::kernels
