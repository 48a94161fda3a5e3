// SPDX-License-Identifier: Apache-2.0
#pragma once

// Causal attention on the CPU, one head at a time, its rows block by block. A block takes two
// products forward, five backward, and one pass over the scores between them. A row sees the keys
// up to its own position. So a block computes no more keys than its last row sees. The same for
// rows that are not contiguous is in ragged_attention.h.
//
// Probabilities exist for one block at a time. The gradient recomputes them from the logarithm of
// their sum (Dao et al., "FlashAttention", 2022). One thread computes a head. So results depend on
// the number of threads only as the products of BLAS do.

#include <c10/core/ScalarType.h>

#include "dynmo/kernels/operations.h"

namespace dynmo::kernels {

// Returns whether libtorch's BLAS has the products of this type that blocked attention needs.
[[nodiscard]] bool has_blocked_attention(at::ScalarType type);
// Returns `type` if BLAS has the products of that type, else fp32.
[[nodiscard]] at::ScalarType product_type(at::ScalarType type);

// Returns x with each head repeated for the query heads that share it, side by side. `heads` are
// those of the queries.
[[nodiscard]] at::Tensor repeated_heads(const at::Tensor& x_BTHK, std::int64_t heads);
// Computes the gradient of repeated_heads(). `heads` are those of x.
[[nodiscard]] at::Tensor summed_heads(const at::Tensor& gradient_BTHK, std::int64_t heads);

// Like causal_attention() and its gradient, for CPU tensors. Tensors may have any strides, except
// that K is contiguous. Results are contiguous.
[[nodiscard]] Attention blocked_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                                          const at::Tensor& v_BTHK);
[[nodiscard]] AttentionGradient blocked_attention_gradient(const at::Tensor& gradient_BTHK,
                                                           const at::Tensor& q_BTHK,
                                                           const at::Tensor& k_BTHK,
                                                           const at::Tensor& v_BTHK,
                                                           const Attention& attention);

}  // namespace dynmo::kernels
