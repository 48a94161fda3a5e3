// SPDX-License-Identifier: Apache-2.0
#pragma once

// Moments of whole numbers.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "dynmo/tensor/features.h"

namespace dynmo::tensor {

__extension__ using Wide = unsigned __int128;

// Exact sums of whole numbers. Every moment follows from them.
class Counted {
 public:
  void add(std::uint64_t count) {
    ++groups_;
    sum_ += count;
    squares_ += Wide{count} * count;
    min_ = std::min(min_, count);
    max_ = std::max(max_, count);
  }
  [[nodiscard]] Distribution over(double possible) const {
    Distribution result{.groups = possible,
                        .nonempty = groups_,
                        .sum = static_cast<double>(sum_),
                        .max = static_cast<double>(max_)};
    if (groups_ == 0) return result;
    result.of_nonempty = spread(static_cast<double>(groups_), groups_, min_);
    const auto all = possible < 0x1p63 ? static_cast<std::uint64_t>(possible) : 0;
    const bool some_empty = possible > static_cast<double>(groups_);
    result.all = spread(possible, all, some_empty ? 0 : min_);
    return result;
  }

 private:
  // Returns the spread of n groups. `whole` is n as an integer, or 0 if that needs more bits.
  [[nodiscard]] Spread spread(double n, std::uint64_t whole, std::uint64_t min) const {
    const double mean = static_cast<double>(sum_) / n;
    double variance = static_cast<double>(squares_) / n - mean * mean;
    // (n squares - sum^2) / n^2, without cancellation if it fits.
    if (whole > 0 && squares_ <= ~Wide{0} / whole) {
      variance = static_cast<double>(squares_ * whole - Wide{sum_} * sum_) / n / n;
    }
    const double std = std::sqrt(std::max(variance, 0.0));
    return {.min = static_cast<double>(min),
            .mean = mean,
            .std = std,
            .cv = mean > 0 ? std / mean : 0,
            .imbalance = mean > 0 ? static_cast<double>(max_) / mean - 1 : 0};
  }

  std::uint64_t groups_ = 0;
  std::uint64_t sum_ = 0;
  Wide squares_ = 0;
  std::uint64_t min_ = ~std::uint64_t{0};
  std::uint64_t max_ = 0;
};

}  // namespace dynmo::tensor
