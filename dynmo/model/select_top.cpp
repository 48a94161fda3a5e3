// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/select_top.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "dynmo/core/check.h"

namespace dynmo::model {

std::vector<std::int64_t> select_top(std::span<const float> scores, std::int64_t count) {
  DYNMO_CHECK(count >= 0 && count <= std::ssize(scores), "0 to {} of the scores, got {}",
              scores.size(), count);
  std::vector<std::int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  const auto before = [&](std::int64_t a, std::int64_t b) {
    const float left = scores[static_cast<std::size_t>(a)];
    const float right = scores[static_cast<std::size_t>(b)];
    if (std::isnan(left) != std::isnan(right)) return std::isnan(right);
    if (left == right || std::isnan(left)) return a < b;
    return left > right;
  };
  std::nth_element(order.begin(), order.begin() + count, order.end(), before);
  order.resize(static_cast<std::size_t>(count));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace dynmo::model
