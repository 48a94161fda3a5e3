// SPDX-License-Identifier: Apache-2.0
#pragma once

// Operations of layers by the kernels of device/kernels.cu, each in one pass over memory where a
// composition (generic.h) has three to nine. Arguments and results are those of operations.h. So
// are the bits, but for the order of a row's sum.
//
// All tensors of a call are on one device, for which serves() holds. Nothing waits for it.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>

#include "dynmo/kernels/device/launcher.h"
#include "dynmo/kernels/operations.h"

namespace dynmo::kernels::fused {

// Returns whether kernels serve these tensors. Their device has kernels, and the first is of fp32
// or bf16. All are contiguous and start at multiples of 16 bytes. Undefined ones count as served.
[[nodiscard]] bool serves(const at::Tensor& first, std::initializer_list<at::Tensor> others = {});

[[nodiscard]] at::Tensor swiglu(const at::Tensor& gate_NF, const at::Tensor& up_NF);
void swiglu_gradient(at::Tensor& gate_NF, at::Tensor& up_NF, at::Tensor& product_NF);

// Returns NaN if a target is outside the vocabulary.
[[nodiscard]] at::Tensor cross_entropy(at::Tensor& scores_NV, const at::Tensor& targets_N,
                                       std::int64_t tokens);
void cross_entropy_gradient(at::Tensor& probabilities_NV, const at::Tensor& targets_N,
                            double gradient, std::int64_t tokens);

// Takes `cosine` and `sine` of the tokens' positions: [T, K / 2], fp32.
void apply_rope(at::Tensor& x_BTHK, const at::Tensor& cosine, const at::Tensor& sine,
                Rope direction);

// Like generic::keep_mask().
[[nodiscard]] at::Tensor keep_mask(const at::Tensor& like, std::uint64_t key,
                                   std::uint32_t threshold);

// Makes one update of AdamW of fp32 tensors, and zeroes the gradient. `copy`, if defined, becomes
// the values in bf16.
void update(const at::Tensor& value, const at::Tensor& gradient, const at::Tensor& first_moment,
            const at::Tensor& second_moment, const at::Tensor& copy,
            const device::AdamWFactors& factors);

}  // namespace dynmo::kernels::fused
