// SPDX-License-Identifier: Apache-2.0
#pragma once

// Chooses by scores: the rows with the highest ones, or an expert for each token.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dynmo::kernels {

// A total order of indices: the higher score, then the lower index. NaN comes last. So a step that
// diverges ends by its loss, as it does without a selection.
template <typename Score>
struct HigherFirst {
  std::span<const Score> scores;
  bool operator()(std::int64_t a, std::int64_t b) const {
    const Score left = scores[static_cast<std::size_t>(a)];
    const Score right = scores[static_cast<std::size_t>(b)];
    if (std::isnan(left) != std::isnan(right)) return std::isnan(right);
    if (left == right || std::isnan(left)) return a < b;
    return left > right;
  }
};

// Returns the first `count` indices by HigherFirst, sorted. Requires 0 <= count <= scores.size().
[[nodiscard]] std::vector<std::int64_t> select_top(std::span<const double> scores,
                                                   std::int64_t count);
[[nodiscard]] std::vector<std::int64_t> select_top(std::span<const float> scores,
                                                   std::int64_t count);

// Assigns tokens to experts so that all experts get the same number and the sum of the scores is
// the largest possible. BASE layers solve this problem in every forward pass (Lewis et al., "BASE
// layers: simplifying training of large, sparse models", 2021).
//
// Returns the experts of every token: `top_k` different ones, ascending. No expert has more than
// ceil(tokens x top_k / experts) tokens. `scores` has those of token 0 for all experts, then those
// of token 1, and so on. A score that is not finite counts as very small or very large.
//
// Exact. Tokens are added one by one along the best path over the experts, on which each token
// moves on to make room. Costs O(tokens top_k (experts^2 + log tokens)) if no path is long. Equal
// scores always give the same result. Requires 1 <= top_k <= experts.
[[nodiscard]] std::vector<std::int32_t> balanced_assignment(std::span<const double> scores,
                                                            std::int64_t experts,
                                                            std::int64_t top_k);

}  // namespace dynmo::kernels
