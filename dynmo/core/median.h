// SPDX-License-Identifier: Apache-2.0
#pragma once

// Means of measured values, and medians, which one disturbed step does not move.

#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace dynmo {

// Ratios for normal distributions. The first is standard deviation / median of the distances from
// the median. The second is standard error of a median / that of a mean.
inline constexpr double kDeviationPerMad = 1.4826;
inline constexpr double kMedianPerMeanError = 1.2533;

// Returns the median: the mean of the two middle values for an even number of values, and 0 for
// none.
[[nodiscard]] double median(std::vector<double> values);
// Like median(), without a copy. Changes the order of the values.
[[nodiscard]] double median_in_place(std::span<double> values);
// Returns the median of one number over the elements of a range.
template <typename Range, typename Get>
double median_of(const Range& range, Get get) {
  std::vector<double> values;
  for (const auto& element : range) values.push_back(get(element));
  return median(std::move(values));
}

// Returns the mean. Requires one value or more.
[[nodiscard]] inline double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}
// Returns part / whole, or 0 if `whole` is 0.
[[nodiscard]] inline double share(double part, double whole) {
  return whole > 0 ? part / whole : 0;
}

}  // namespace dynmo
