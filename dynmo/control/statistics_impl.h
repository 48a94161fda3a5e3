// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shares and medians for the profiler and its measure of noise.

#include <utility>
#include <vector>

#include "dynmo/core/median.h"

namespace dynmo::control {

// Returns the median of one number over the elements of a range.
template <typename Range, typename Get>
double median_of(const Range& range, Get get) {
  std::vector<double> values;
  for (const auto& element : range) values.push_back(get(element));
  return median(std::move(values));
}

inline double share(double part, double whole) { return whole > 0 ? part / whole : 0; }

}  // namespace dynmo::control
