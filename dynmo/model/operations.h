// SPDX-License-Identifier: Apache-2.0
#pragma once

// Differentiable building blocks of transformer layers, for CPU tensors. Each keeps for backward
// only what it cannot recompute cheaply (model/memory.h counts it), and computes in the type
// of its arguments, so that tests can run a whole layer in fp64.
//
// Dimensions: B sequences, T tokens, N = B x T, D hidden, H heads, K head size.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dynmo::model {

// x / sqrt(mean(x^2) + epsilon) * weight over the last dimension (Zhang and Sennrich, "Root mean
// square layer normalization", 2019). Keeps x and one number a row.
[[nodiscard]] at::Tensor rms_norm(const at::Tensor& x_ND, const at::Tensor& weight_D,
                                  double epsilon);

// silu(gate) * up (Shazeer, "GLU variants improve transformer", 2020). Keeps gate and up.
[[nodiscard]] at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

// Cosines and sines of rotary position embedding (Su et al., "RoFormer", 2021): position t turns
// pair k by the angle t x theta^(-2k / head_size). Immutable; any thread may read it.
struct RotaryTable {
  at::Tensor cosine;  // fp64 [positions, head_size / 2]
  at::Tensor sine;
  at::Tensor cosine_float;  // the same in fp32
  at::Tensor sine_float;
};
[[nodiscard]] RotaryTable rotary_table(std::int64_t positions, std::int64_t head_size,
                                       double theta);

// Turns the pairs (k, k + K/2) of every head by the angle of its token's position, Hugging Face's
// pairing. Keeps nothing (the transpose of a rotation turns back). Requires T <= positions.
[[nodiscard]] at::Tensor rotate(const at::Tensor& x_BTHK, const RotaryTable& table);

// softmax(q k^T / sqrt(K)) v of each head, token t seeing tokens 0..t. Heads of q are a multiple of
// those of k and v: query head h reads key head h / (H / kv heads). Returns [B, T, H, K].
[[nodiscard]] at::Tensor causal_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                                          const at::Tensor& v_BTHK);

// Mean over rows of -log softmax(logits)[target], a scalar. Keeps the log-probabilities.
[[nodiscard]] at::Tensor mean_cross_entropy(const at::Tensor& logits_NV,
                                            const at::Tensor& targets_N);

}  // namespace dynmo::model
