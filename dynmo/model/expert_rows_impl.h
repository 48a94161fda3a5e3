// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gathers tokens by place into the rows of experts, and sums the experts' results by token.
// Dimensions as in moe_router.h, D hidden.

#include <ATen/core/Tensor.h>

#include <vector>

#include "dynmo/model/moe_router.h"

namespace dynmo::model {

// Returns the tokens of x by place.
[[nodiscard]] at::Tensor expert_rows(const at::Tensor& x_ND, const Routing& routing);

// Returns the sum over a token's slots, in their order, of gate x row, or of the rows without
// gates. `rows` are those of each expert, contiguous, or undefined if it has none. On a device they
// are one tensor, by place. A token without rows gets 0. Sums of bf16 are fp32, rounded once.
enum class Gates { kYes, kNo };
[[nodiscard]] at::Tensor summed_by_token(const std::vector<at::Tensor>& rows,
                                         const Routing& routing, const at::Tensor& like_ND,
                                         Gates gates);

// Computes the gradient of the sum above, with gates. `rows` become the gradients of the rows.
// Returns those of the gates, NK, which are 0 if there was no row.
[[nodiscard]] at::Tensor through_gates(std::vector<at::Tensor>& rows, const Routing& routing,
                                       const at::Tensor& gradient_ND);

}  // namespace dynmo::model
