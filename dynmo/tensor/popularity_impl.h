// SPDX-License-Identifier: Apache-2.0
#pragma once

// The popularity of an expert is exp(f(t) g(b) (lasting u + drifting y(t))). Here u is drawn once.
// The series y is of first order: y(t) = rho y(t - 1) + sqrt(1 - rho^2) e(t). The counts of block b
// in step t are its tokens times the experts' shares of the popularity.
//
// The three parameters and the factors f and g are found iteratively: part of the counts is made,
// measured and corrected.

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/rng.h"
#include "dynmo/tensor/generate.h"

namespace dynmo::tensor {

struct Popularity {
  double lasting = 0;
  double drifting = 0;
  double rho = 0;
  Unevenness factors = {};  // factors of parts of the steps and blocks; means of 1

  [[nodiscard]] double of_step(std::int64_t step, std::int64_t steps) const {
    return value_at(factors.steps, step, steps);
  }
  [[nodiscard]] double of_block(std::int64_t block, std::int64_t blocks) const {
    return value_at(factors.rows, block, blocks);
  }
  // Returns the value at `index` of `count`, linear between the middles of the parts, or 1 without
  // parts.
  static double value_at(const std::vector<double>& parts, std::int64_t index, std::int64_t count) {
    if (parts.empty()) return 1;
    const auto n = static_cast<double>(parts.size());
    const double place = std::clamp(
        (static_cast<double>(index) + 0.5) / static_cast<double>(count) * n - 0.5, 0.0, n - 1);
    const auto before = static_cast<std::size_t>(place);
    const std::size_t behind = std::min(before + 1, parts.size() - 1);
    const double share = place - static_cast<double>(before);
    return (1 - share) * parts[before] + share * parts[behind];
  }
};

// Returns a new stream of the draws of an expert: u, then e(0), e(1), ...
[[nodiscard]] Rng series_of(const CountsRequest& request, std::int64_t block, std::int64_t expert);

// Replaces each weight w by a whole number. The numbers are proportional to exp(w) and have the sum
// `total`. None has a share above `most`, except by rounding.
void apportion(std::vector<double>& weights, double total, double most);

// Returns the parameters whose counts have the measures of the request. If its profile of steps and
// blocks cannot be met, they are the nearest ones found, or those of the profile in fewer parts.
// `series` is the noun for what the counts belong to.
//
// Fails with kBadInput if two measures contradict each other, and names them.
[[nodiscard]] Expected<Popularity> fitted(const CountsRequest& request, std::string_view series);

}  // namespace dynmo::tensor
