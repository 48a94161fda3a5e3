// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tolerances of a device's losses against the CPU's.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "dynmo/cost/family.h"

namespace dynmo::testing {

// Compares the losses of all steps, and returns the largest relative distance.
inline double expect_like_cpu(const std::vector<double>& device, const std::vector<double>& cpu,
                              cost::Precision precision) {
  const double tolerance = precision == cost::Precision::kFp32 ? 1e-5 : 3e-3;
  EXPECT_EQ(device.size(), cpu.size());
  double largest = 0;
  for (std::size_t step = 0; step < std::min(device.size(), cpu.size()); ++step) {
    const double distance = std::abs(device[step] / cpu[step] - 1);
    largest = std::max(largest, distance);
    EXPECT_LT(distance, tolerance) << "step " << step;
  }
  return largest;
}

}  // namespace dynmo::testing
