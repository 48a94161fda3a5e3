// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rows with the highest scores, chosen alike wherever they are chosen.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dynmo::kernels {

// A total order of indices: the higher score, then the lower index; a score of NaN comes
// last, so that a step that diverges ends as it does without a selection, by its loss.
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

// Indices of the `count` first in that order, ascending. Requires 0 <= count <= scores.size().
[[nodiscard]] std::vector<std::int64_t> select_top(std::span<const double> scores,
                                                   std::int64_t count);
[[nodiscard]] std::vector<std::int64_t> select_top(std::span<const float> scores,
                                                   std::int64_t count);

}  // namespace dynmo::kernels
