// SPDX-License-Identifier: Apache-2.0
#pragma once

// The middle of measured values: what one disturbed step does not move.

#include <span>
#include <vector>

namespace dynmo {

// For normal distributions: standard deviation / median of the distances from the median, and
// standard error of a median / that of a mean.
inline constexpr double kDeviationPerMad = 1.4826;
inline constexpr double kMedianPerMeanError = 1.2533;

// Returns the mean of the two middle values where their number is even, and 0 where there are none.
[[nodiscard]] double median(std::vector<double> values);
// Without a copy: the order of the values is another one afterwards.
[[nodiscard]] double median_in_place(std::span<double> values);

}  // namespace dynmo
