// SPDX-License-Identifier: Apache-2.0
#pragma once

// The middle of measured values: what one disturbed step does not move.

#include <span>
#include <vector>

namespace dynmo {

// Of a normal distribution: its standard deviation to the median of distances from its median, and
// the standard error of a median to that of a mean.
inline constexpr double kDeviationPerMad = 1.4826;
inline constexpr double kMedianPerMeanError = 1.2533;

// Of an even number of values the mean of the two in the middle; 0 of none.
[[nodiscard]] double median(std::vector<double> values);
// Without a copy: the order of the values is another one afterwards.
[[nodiscard]] double median_in_place(std::span<double> values);

}  // namespace dynmo
