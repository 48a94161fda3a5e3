// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/select_top.h"

#include <algorithm>
#include <numeric>

#include "dynmo/core/check.h"

namespace dynmo::kernels {
namespace {

template <typename Score>
std::vector<std::int64_t> selected(std::span<const Score> scores, std::int64_t count) {
  DYNMO_CHECK(count >= 0 && count <= std::ssize(scores), "0 to {} of the scores, got {}",
              scores.size(), count);
  std::vector<std::int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::nth_element(order.begin(), order.begin() + count, order.end(), HigherFirst<Score>{scores});
  order.resize(static_cast<std::size_t>(count));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace

std::vector<std::int64_t> select_top(std::span<const float> scores, std::int64_t count) {
  return selected(scores, count);
}

std::vector<std::int64_t> select_top(std::span<const double> scores, std::int64_t count) {
  return selected(scores, count);
}

}  // namespace dynmo::kernels
