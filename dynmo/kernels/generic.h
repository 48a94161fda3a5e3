// SPDX-License-Identifier: Apache-2.0
#pragma once

// The operations of layers as compositions of libtorch's, for devices for which loops.h has no
// loops. They run on any device, so tests compare them with the kernels on the CPU. Arguments and
// results are those of operations.h.
//
// Nothing here waits for the device. No value is read, and no bound is checked if it is in the
// device's memory.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "dynmo/core/rng.h"
#include "dynmo/kernels/operations.h"

namespace dynmo::kernels {

// Returns whether the operator, such as "aten::mm", has a kernel of its own for x's device. An
// overload, such as "dtype_out" of "aten::addmm", is an operator of its own. Some operators have a
// kernel for CUDA, but none for the CPU. Others have one for some CUDA devices alone.
[[nodiscard]] bool has_kernel(const char* name, const at::Tensor& x, const char* overload = "");

}  // namespace dynmo::kernels

namespace dynmo::kernels::generic {

// Uses libtorch's fused kernels if the device has them, and rows and weight have the same type.
// Otherwise uses the formula.
[[nodiscard]] Normed rms_norm(const at::Tensor& x_ND, const at::Tensor& weight_D, double epsilon);
[[nodiscard]] at::Tensor normed_again(const at::Tensor& x_ND, const at::Tensor& inverse_N1,
                                      const at::Tensor& weight_D, double epsilon);
[[nodiscard]] NormGradient norm_gradient(const at::Tensor& gradient_ND, const at::Tensor& x_ND,
                                         const at::Tensor& inverse_N1, const at::Tensor& weight_D,
                                         InputGradient wanted, const at::Tensor& residual_ND);

// Returns silu(gate) * up. Rounds in bf16 after each of the two operations, unlike the CPU's loop,
// which rounds once. One rounding would need fp32 copies, which cost too much.
[[nodiscard]] at::Tensor swiglu(const at::Tensor& gate_NF, const at::Tensor& up_NF);
void swiglu_gradient(at::Tensor& gate_NF, at::Tensor& up_NF, at::Tensor& product_NF);

[[nodiscard]] at::Tensor softmax(at::Tensor& scores_NV);
// Like cross_entropy() of operations.h, except for a target outside the vocabulary. The device
// decides the result of such a target. The sampler (data/sampler.h) refuses it.
[[nodiscard]] at::Tensor cross_entropy(at::Tensor& scores_NV, const at::Tensor& targets_N,
                                       std::int64_t tokens = 0);
void cross_entropy_gradient(at::Tensor& probabilities_NV, const at::Tensor& targets_N,
                            double gradient, std::int64_t tokens = 0);

// Rotates as apply_rope() of operations.h does. `cosine` and `sine` are those of the
// tokens' positions: [T, K / 2], on x's device and of its accumulation_type.
void apply_rope(at::Tensor& x_BTHK, const at::Tensor& cosine, const at::Tensor& sine,
                Rope direction);

// The fused operation that libtorch chooses for attention on a device: the answers of
// at::_fused_sdp_choice (sdp::SDPBackend of the library).
enum class Fused : std::int64_t { kNone = 0, kFlash = 1, kEfficient = 2, kCudnn = 3 };

// Returns the choice by type, shape and device. It is cuDNN's only if equal bits are not demanded
// (c10d/determinism.h). Requires a device that has such operations.
[[nodiscard]] Fused fused_choice(const at::Tensor& q_BHTK, const at::Tensor& k_BHTK,
                                 const at::Tensor& v_BHTK);

// Requires the same number of heads in k, v and q. Uses the fused operation that libtorch chooses
// for type, shape and device, if the device has one that keeps no T x T probabilities. Otherwise
// uses the formula.
[[nodiscard]] Attention causal_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                                         const at::Tensor& v_BTHK);
[[nodiscard]] AttentionGradient causal_attention_gradient(const at::Tensor& gradient_BTHK,
                                                          const at::Tensor& q_BTHK,
                                                          const at::Tensor& k_BTHK,
                                                          const at::Tensor& v_BTHK,
                                                          const Attention& attention);

// Adds a_KM^T b_KN of bf16 matrices to an fp32 matrix. Where the device has a kernel for it, this
// is one product, without a temporary. Otherwise the product is rounded to bf16 before it is added.
void add_product(at::Tensor& sum_MN, const at::Tensor& a_KM, const at::Tensor& b_KN);

// Returns the places in each row that select_top() chooses, int64, [B, count].
[[nodiscard]] at::Tensor select_top(const at::Tensor& scores_BT, std::int64_t count);

// Like add_rows() of model/hand_written.h.
void add_rows(at::Tensor& gradient_VD, const at::Tensor& tokens, const at::Tensor& from);

// Returns which of `like`'s elements dropout keeps, with the CPU's bits. Element i is kept if word
// i of philox under `key` is at least `threshold`.
[[nodiscard]] at::Tensor keep_mask(const at::Tensor& like, std::uint64_t key,
                                   std::uint32_t threshold);

// Returns the sum of the squares in fp64, in the device's order of additions.
[[nodiscard]] double sum_of_squares(const at::Tensor& tensor);

}  // namespace dynmo::kernels::generic
