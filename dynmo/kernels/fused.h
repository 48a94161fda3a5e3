// SPDX-License-Identifier: Apache-2.0
#pragma once

// Operations of layers by the kernels of device/kernels.cu. Each is one kernel, while a composition
// (generic.h) passes over memory three to nine times. Arguments and results are those of
// operations.h, with the CPU's bits. Only sums over a row, and over the rows for the weight of a
// norm, have another order.
//
// Requires serves() for the tensors of a call, all on one device. No call waits for the device.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>

#include "dynmo/kernels/device/launcher.h"
#include "dynmo/kernels/operations.h"

namespace dynmo::kernels::fused {

// Returns whether the kernels take these tensors. The device must have kernels, and `first` be fp32
// or bf16. All must be contiguous and start at multiples of 16 bytes, or be undefined.
[[nodiscard]] bool serves(const at::Tensor& first, std::initializer_list<at::Tensor> others = {});

[[nodiscard]] at::Tensor swiglu(const at::Tensor& gate_NF, const at::Tensor& up_NF);
void swiglu_gradient(at::Tensor& gate_NF, at::Tensor& up_NF, at::Tensor& product_NF);

[[nodiscard]] NormGradient norm_gradient(const at::Tensor& gradient_ND, const at::Tensor& x_ND,
                                         const at::Tensor& inverse_N1, const at::Tensor& weight_D,
                                         InputGradient wanted, const at::Tensor& residual_ND);

// Like cross_entropy() of operations.h, but returns NaN if a target is outside the vocabulary.
[[nodiscard]] at::Tensor cross_entropy(at::Tensor& scores_NV, const at::Tensor& targets_N,
                                       std::int64_t tokens);
void cross_entropy_gradient(at::Tensor& probabilities_NV, const at::Tensor& targets_N,
                            double gradient, std::int64_t tokens);

// Rotates as apply_rope() of operations.h does. `cosine` and `sine` are those of the tokens'
// positions: [T, K / 2], fp32.
void apply_rope(at::Tensor& x_BTHK, const at::Tensor& cosine, const at::Tensor& sine,
                Rope direction);

// Like generic::keep_mask().
[[nodiscard]] at::Tensor keep_mask(const at::Tensor& like, std::uint64_t key,
                                   std::uint32_t threshold);

// Updates fp32 tensors by one step of AdamW, in place, and zeroes the gradient. `copy`, if defined,
// gets the new values, rounded to bf16.
void update(const at::Tensor& value, const at::Tensor& gradient, const at::Tensor& first_moment,
            const at::Tensor& second_moment, const at::Tensor& copy,
            const device::AdamWFactors& factors);

}  // namespace dynmo::kernels::fused
