// SPDX-License-Identifier: Apache-2.0
#pragma once

// Chooses the rows with the highest scores by one rule.

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

// Returns the first `count` indices in that order, ascending. Requires 0 <= count <= scores.size().
[[nodiscard]] std::vector<std::int64_t> select_top(std::span<const double> scores,
                                                   std::int64_t count);
[[nodiscard]] std::vector<std::int64_t> select_top(std::span<const float> scores,
                                                   std::int64_t count);

}  // namespace dynmo::kernels
