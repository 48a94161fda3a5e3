// SPDX-License-Identifier: Apache-2.0
#pragma once

// Medians of measured values, which one disturbed step does not move.

#include <span>
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

}  // namespace dynmo
