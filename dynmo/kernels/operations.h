// SPDX-License-Identifier: Apache-2.0
#pragma once

// Building blocks of hand-written transformer layers, each with its gradient as a function beside
// it. They do not use autograd. So a layer decides itself what it keeps and when its weight
// gradients run.
//
// Each function computes in the type of its arguments, so tests can run a whole layer in fp64. For
// bf16 arguments, the norm's statistics, angles and sums are fp32. On the CPU, loops.h computes
// them and rounds results once. On other devices some functions have a kernel of our own (fused.h).
// The others are composed of libtorch's operations, which do not wait for the device. All tensors
// of a call are on one device.
//
// Dimensions: B sequences, T tokens, N = B x T, D hidden, F of an MLP, V vocabulary, H heads, K
// head size.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <memory>

#include "dynmo/kernels/input_gradient.h"

namespace dynmo::kernels {

// Returns fp32 for bf16, and the type itself otherwise.
[[nodiscard]] at::ScalarType accumulation_type(at::ScalarType type);
// Returns the tensor in its accumulation_type: itself unless it is bf16.
[[nodiscard]] at::Tensor wide(const at::Tensor& x);

// Computes root mean square layer normalization (Zhang and Sennrich, 2019). rms_norm(x) = x *
// inverse * weight with inverse = 1 / sqrt(mean_D(x^2) + epsilon).
struct Normed {
  at::Tensor y_ND;
  at::Tensor inverse_N1;  // in accumulation_type
};
[[nodiscard]] Normed rms_norm(const at::Tensor& x_ND, const at::Tensor& weight_D, double epsilon);
// Returns y_ND of rms_norm() once more, with its bits. `inverse_N1` is that of rms_norm(). With it
// the CPU saves a pass. A device's fused kernel computes the inverse again, and needs `epsilon`.
[[nodiscard]] at::Tensor normed_again(const at::Tensor& x_ND, const at::Tensor& inverse_N1,
                                      const at::Tensor& weight_D, double epsilon);
struct NormGradient {
  // In x's type, rounded once. Undefined if it is not wanted.
  at::Tensor x_ND;
  at::Tensor weight_D;  // in accumulation_type
};
// Returns the gradients of rms_norm(). Adds `residual_ND`, if defined, to the gradient of x.
[[nodiscard]] NormGradient norm_gradient(const at::Tensor& gradient_ND, const at::Tensor& x_ND,
                                         const at::Tensor& inverse_N1, const at::Tensor& weight_D,
                                         InputGradient wanted, const at::Tensor& residual_ND = {});

// Computes silu(gate) * up, element by element. It is the middle of a gated MLP (Shazeer, "GLU
// variants improve transformer", 2020).
[[nodiscard]] at::Tensor swiglu(const at::Tensor& gate_NF, const at::Tensor& up_NF);
// Replaces `gate` and `up` by their gradients, in place. `product` is the gradient of silu(gate) *
// up on entry, and becomes silu(gate) * up. The weight gradient of the next matrix needs this
// product.
void swiglu_gradient(at::Tensor& gate_NF, at::Tensor& up_NF, at::Tensor& product_NF);

// Replaces the scores, fp32 or fp64, by probabilities, in place. Returns the logarithm of each
// row's sum of exponentials, [N].
[[nodiscard]] at::Tensor softmax(at::Tensor& scores_NV);
// Returns the mean over the rows of -log softmax(scores)[target], a scalar, and replaces the scores
// by probabilities, in place. Targets are int64, 0 to V - 1. On the CPU another target fails a
// check.
//
// If `tokens` > 0, the sum over the rows is divided by `tokens` instead. This serves rows that are
// only some of a micro-batch's tokens.
[[nodiscard]] at::Tensor cross_entropy(at::Tensor& scores_NV, const at::Tensor& targets_N,
                                       std::int64_t tokens = 0);
// Replaces the probabilities that cross_entropy() left by the gradient of the scores, in place.
// `gradient` is that of its result.
void cross_entropy_gradient(at::Tensor& probabilities_NV, const at::Tensor& targets_N,
                            double gradient, std::int64_t tokens = 0);

// Cosines and sines of rotary position embedding (cost/rotary.h). Any thread may use a table.
// Copies share all data.
struct RotaryTable {
  struct Angles {
    at::Tensor cosine;  // [positions, head_size / 2]
    at::Tensor sine;
  };
  class Copies;  // tables on other devices, made on first use

  Angles doubles;  // fp64, on the CPU
  Angles floats;   // fp32, on the CPU
  std::shared_ptr<Copies> copies;

  // Returns the angles in `like`'s accumulation_type, on its device.
  [[nodiscard]] Angles of(const at::Tensor& like) const;
};
// Makes a table for positions below `positions` and heads of two elements for each frequency.
[[nodiscard]] RotaryTable rotary_table(std::int64_t positions,
                                       const std::vector<double>& frequencies);

// Rotates the pairs (k, k + K/2) of every head by the angle of its token's position, in place. This
// is Hugging Face's pairing. Direction kBack undoes the rotation and is its gradient. The first
// token is at position `first`. Requires first + T <= positions, contiguous.
enum class Rope { kForward, kBack };
void apply_rope(at::Tensor& x_BTHK, const RotaryTable& table, Rope direction,
                std::int64_t first = 0);
// Like apply_rope() above, for tokens with positions of their own, int64.
void apply_rope(at::Tensor& x_BTHK, const RotaryTable& table, Rope direction,
                const at::Tensor& positions_BT);

// The result of softmax(q k^T / sqrt(K)) v for each head, in which token t sees tokens 0..t. The
// number of heads of q is a multiple of that of k and v. Query head h reads key head h / (H / kv
// heads). If k and v have more tokens than q, q's are the last of them, and there is no gradient.
struct Attention {
  at::Tensor out_BTHK;
  // Logarithm of the sum of the exponentials of the scores, for each head and token. The gradient
  // needs nothing else of the T x T probabilities.
  at::Tensor log_sum_exp;
  // State of the unused dropout, which gradients on CUDA need. Undefined elsewhere.
  std::array<at::Tensor, 2> draws = {};
};
[[nodiscard]] Attention causal_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                                         const at::Tensor& v_BTHK);
struct AttentionGradient {
  at::Tensor q_BTHK;  // contiguous, shaped like the arguments of causal_attention
  at::Tensor k_BTHK;
  at::Tensor v_BTHK;
};
[[nodiscard]] AttentionGradient causal_attention_gradient(const at::Tensor& gradient_BTHK,
                                                          const at::Tensor& q_BTHK,
                                                          const at::Tensor& k_BTHK,
                                                          const at::Tensor& v_BTHK,
                                                          const Attention& attention);

}  // namespace dynmo::kernels
