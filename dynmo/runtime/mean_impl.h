// SPDX-License-Identifier: Apache-2.0
#pragma once

// The mean over the ranks or micro-batches of a step.

#include <numeric>
#include <vector>

namespace dynmo::runtime {

// Returns the mean. Requires one value or more.
[[nodiscard]] inline double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace dynmo::runtime
