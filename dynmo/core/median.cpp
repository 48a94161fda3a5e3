// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/median.h"

#include <algorithm>

namespace dynmo {

double median_in_place(std::span<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

double median(std::vector<double> values) { return median_in_place(values); }

}  // namespace dynmo
