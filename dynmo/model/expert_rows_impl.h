// SPDX-License-Identifier: Apache-2.0
#pragma once

// Between tokens and the rows of experts: tokens are gathered by place, and what experts made of
// them is added up by token. Dimensions as in moe_router.h, D hidden.

#include <ATen/core/Tensor.h>

#include <vector>

#include "dynmo/model/moe_router.h"

namespace dynmo::model {

// The tokens of x by place.
[[nodiscard]] at::Tensor expert_rows(const at::Tensor& x_ND, const Routing& routing);

// Sum over a token's slots, in their order, of gate x row; without gates of the rows. `rows` are
// those of each expert, contiguous (undefined: none). A token without rows gets 0. Sums of bf16 are
// fp32, rounded once.
enum class Gates { kYes, kNo };
[[nodiscard]] at::Tensor summed_by_token(const std::vector<at::Tensor>& rows,
                                         const Routing& routing, const at::Tensor& like_ND,
                                         Gates gates);

// The gradient of that sum with gates: `rows` become the gradients of the rows. Returns those of
// the gates, NK, 0 where no row was.
[[nodiscard]] at::Tensor through_gates(std::vector<at::Tensor>& rows, const Routing& routing,
                                       const at::Tensor& gradient_ND);

}  // namespace dynmo::model
