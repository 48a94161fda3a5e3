// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gathers tokens by place into the rows of experts, and sums the experts' results by token.
// Dimensions as in moe_router.h, D hidden.

#include <ATen/core/Tensor.h>

#include <vector>

#include "dynmo/model/moe_router.h"

namespace dynmo::model {

// Returns the rows of x that the experts get, [A, D]: by expert, then by token.
[[nodiscard]] at::Tensor expert_rows(const at::Tensor& x_ND, const Routing& routing);

// Returns [N, D]: for each token the sum of its rows, in the order of its slots. With Gates::kYes
// each row is first multiplied by its gate. `rows` has a tensor for each expert, undefined if it
// has no row. On a device it has one tensor of all rows. A token without rows gets 0. Sums of bf16
// are fp32, rounded once.
enum class Gates { kYes, kNo };
[[nodiscard]] at::Tensor summed_by_token(const std::vector<at::Tensor>& rows,
                                         const Routing& routing, const at::Tensor& like_ND,
                                         Gates gates);

// Computes the gradients of summed_by_token() with Gates::kYes. `gradient_ND` is that of its
// result. Replaces each row by its gradient. Returns the gradients of the gates, [N, K], which are
// 0 for slots without a row.
[[nodiscard]] at::Tensor through_gates(std::vector<at::Tensor>& rows, const Routing& routing,
                                       const at::Tensor& gradient_ND);

}  // namespace dynmo::model
