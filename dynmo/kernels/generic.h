// SPDX-License-Identifier: Apache-2.0
#pragma once

// The operations of layers as compositions of libtorch's, for devices that loops.h has no loops
// for. They run on any device, so that tests hold them against the kernels on the CPU; arguments
// and results are those of operations.h. Nothing here waits for the device: no value is read, no
// bound is checked that lies in its memory.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "dynmo/core/rng.h"
#include "dynmo/kernels/operations.h"

namespace dynmo::kernels::generic {

[[nodiscard]] at::Tensor rstd(const at::Tensor& x_ND, double epsilon);
[[nodiscard]] at::Tensor rms_norm(const at::Tensor& x_ND, const at::Tensor& inverse_N1,
                                  const at::Tensor& weight_D);
[[nodiscard]] NormGradient norm_gradient(const at::Tensor& gradient_ND, const at::Tensor& x_ND,
                                         const at::Tensor& inverse_N1, const at::Tensor& weight_D,
                                         InputGradient wanted, const at::Tensor& residual_ND);

// In bf16 each of the two operations rounds, where the CPU's loop rounds once: the fp32 copies that
// this would take cost more than they are worth.
[[nodiscard]] at::Tensor swiglu(const at::Tensor& gate_NF, const at::Tensor& up_NF);
void swiglu_gradient(at::Tensor& gate_NF, at::Tensor& up_NF, at::Tensor& product_NF);

[[nodiscard]] at::Tensor softmax(at::Tensor& scores_NV);
// A target outside the vocabulary is whatever the device makes of it; data/sampler.h refuses them.
[[nodiscard]] at::Tensor cross_entropy(at::Tensor& scores_NV, const at::Tensor& targets_N);
void cross_entropy_gradient(at::Tensor& probabilities_NV, const at::Tensor& targets_N,
                            double gradient);

// Cosines and sines of the first T positions, [T, K / 2], on x's device and of its
// accumulation_type.
void apply_rope(at::Tensor& x_BTHK, const at::Tensor& cosine, const at::Tensor& sine,
                Rope direction);

// As many heads in k and v as in q. On CUDA by the fused operation that libtorch chooses for type,
// shape and device, where there is one that keeps no T x T probabilities; else by the formula.
[[nodiscard]] Attention causal_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                                         const at::Tensor& v_BTHK);
[[nodiscard]] AttentionGradient causal_attention_gradient(const at::Tensor& gradient_BTHK,
                                                          const at::Tensor& q_BTHK,
                                                          const at::Tensor& k_BTHK,
                                                          const at::Tensor& v_BTHK,
                                                          const Attention& attention);

// add_rows of hand_written.h.
void add_rows(at::Tensor& gradient_VD, const at::Tensor& tokens, const at::Tensor& from);

// Which of `like`'s elements dropout keeps: word i of philox under `key` is at least `threshold`.
// The CPU's bits.
[[nodiscard]] at::Tensor keep_mask(const at::Tensor& like, std::uint64_t key,
                                   std::uint32_t threshold);

// Sum of the squares in fp64, in the device's order of additions.
[[nodiscard]] double sum_of_squares(const at::Tensor& tensor);

}  // namespace dynmo::kernels::generic
