// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tokens to experts so that all experts get equally many, and the sum of the scores is as large as
// it can be then: what BASE layers (Lewis et al., "BASE layers: simplifying training of large,
// sparse models", 2021) solve in every forward pass.

#include <cstdint>
#include <span>
#include <vector>

namespace dynmo::kernels {

// The experts of every token, `top_k` each, all different, ascending: no expert has more than
// ceil(tokens x top_k / experts). `scores` are those of token 0 for all experts, of token 1, ...;
// what is not finite counts as very small or very large.
//
// Exact: tokens come one by one, each time along the best path over the experts (a token moves on
// to make room), O(tokens top_k (experts^2 + log tokens)) where no path is long. One result for
// equal scores. Requires 1 <= top_k <= experts.
[[nodiscard]] std::vector<std::int32_t> balanced_assignment(std::span<const double> scores,
                                                            std::int64_t experts,
                                                            std::int64_t top_k);

}  // namespace dynmo::kernels
