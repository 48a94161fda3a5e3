// SPDX-License-Identifier: Apache-2.0
#pragma once

// Building blocks of hand-written transformer layers, each with its gradient as a function beside
// it: no autograd, so that a layer decides itself what it keeps and when its weight gradients run.
// Each computes in the type of its arguments, so that tests can run a whole layer in fp64; of bf16
// arguments the norm's statistics, angles and sums are fp32, and on the CPU results are rounded
// once. On the CPU by loops of their own, on other devices composed of libtorch's operations, which
// do not wait for the device; all tensors of a call are on one.
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

// fp32 for bf16, the type itself otherwise.
[[nodiscard]] at::ScalarType accumulation_type(at::ScalarType type);

// Root mean square layer normalization (Zhang and Sennrich, 2019): rms_norm(x) = x * inverse *
// weight with inverse = 1 / sqrt(mean_D(x^2) + epsilon).
[[nodiscard]] at::Tensor rstd(const at::Tensor& x_ND, double epsilon);  // [N, 1]
[[nodiscard]] at::Tensor rms_norm(const at::Tensor& x_ND, const at::Tensor& inverse_N1,
                                  const at::Tensor& weight_D);
struct NormGradient {
  at::Tensor x_ND;      // of x's type, rounded once; undefined unless wanted
  at::Tensor weight_D;  // of accumulation_type
};
// `residual_ND`, where defined, is added to the gradient of x.
[[nodiscard]] NormGradient norm_gradient(const at::Tensor& gradient_ND, const at::Tensor& x_ND,
                                         const at::Tensor& inverse_N1, const at::Tensor& weight_D,
                                         InputGradient wanted, const at::Tensor& residual_ND = {});

// silu(gate) * up, element by element: the middle of a gated MLP (Shazeer, "GLU variants improve
// transformer", 2020).
[[nodiscard]] at::Tensor swiglu(const at::Tensor& gate_NF, const at::Tensor& up_NF);
// In place: `gate` and `up` become their gradients, `product`, the gradient of silu(gate) * up,
// becomes silu(gate) * up, which the next product's weight gradient needs.
void swiglu_gradient(at::Tensor& gate_NF, at::Tensor& up_NF, at::Tensor& product_NF);

// Returns the logarithm of each row's sum of exponentials, [N], and turns the scores, fp32 or fp64,
// into probabilities, in place.
[[nodiscard]] at::Tensor softmax(at::Tensor& scores_NV);
// Mean over the rows of -log softmax(scores)[target], a scalar. Turns the scores into
// probabilities, in place. Targets are int64, 0 to V - 1; a failed check otherwise, on the CPU.
// `tokens` > 0: the sum over the rows divided by it instead, where they are only some of a
// micro-batch's tokens; on the CPU.
[[nodiscard]] at::Tensor cross_entropy(at::Tensor& scores_NV, const at::Tensor& targets_N,
                                       std::int64_t tokens = 0);
// Turns what cross_entropy left into the gradient of the scores, in place, given that of its
// result.
void cross_entropy_gradient(at::Tensor& probabilities_NV, const at::Tensor& targets_N,
                            double gradient, std::int64_t tokens = 0);

// Cosines and sines of rotary position embedding (Su et al., "RoFormer", 2021): position t turns
// pair k by the angle t x theta^(-2k / head_size). Any thread may use it; copies share everything.
struct RotaryTable {
  struct Angles {
    at::Tensor cosine;  // [positions, head_size / 2]
    at::Tensor sine;
  };
  class Copies;  // those on other devices, each made when it is first asked for

  Angles doubles;  // fp64, on the CPU
  Angles floats;   // the same in fp32
  std::shared_ptr<Copies> copies;

  // Returns them in `like`'s accumulation_type, on its device.
  [[nodiscard]] Angles of(const at::Tensor& like) const;
};
[[nodiscard]] RotaryTable rotary_table(std::int64_t positions, std::int64_t head_size,
                                       double theta);

// Turns the pairs (k, k + K/2) of every head by the angle of its token's position, in place,
// Hugging Face's pairing; kBack undoes it and is its gradient. The first token is at position
// `first`. Requires first + T <= positions, contiguous.
enum class Rope { kForward, kBack };
void apply_rope(at::Tensor& x_BTHK, const RotaryTable& table, Rope direction,
                std::int64_t first = 0);
// The same of tokens at positions of their own, int64. On the CPU.
void apply_rope(at::Tensor& x_BTHK, const RotaryTable& table, Rope direction,
                const at::Tensor& positions_BT);

// softmax(q k^T / sqrt(K)) v of each head, token t seeing tokens 0..t. Heads of q are a multiple of
// those of k and v: query head h reads key head h / (H / kv heads). Where k and v have more tokens
// than q, q's are the last of them (and there is no gradient).
struct Attention {
  at::Tensor out_BTHK;
  at::Tensor log_sum_exp;  // of the scores, one a head and token: all that the gradient needs of
                           // the T x T probabilities
  // What CUDA's operations want back for a dropout that is not used; undefined elsewhere.
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
