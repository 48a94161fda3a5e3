// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks of parameters: one row a field.

#include <initializer_list>
#include <limits>
#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo::dynamism {

struct FieldRange {
  std::string_view field;
  double value = 0;
  double least = 0;
  double most = std::numeric_limits<double>::max();
};

// kBadInput "moe: drift is -1, wanted 0 to 10" for the first value outside, NaN included.
[[nodiscard]] Expected<void> check_ranges(std::string_view source,
                                          std::initializer_list<FieldRange> fields);

}  // namespace dynmo::dynamism
