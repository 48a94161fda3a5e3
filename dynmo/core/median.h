// SPDX-License-Identifier: Apache-2.0
#pragma once

// The middle of measured values: what one disturbed step does not move.

#include <vector>

namespace dynmo {

// Of an even number of values the mean of the two in the middle; 0 of none.
[[nodiscard]] double median(std::vector<double> values);

}  // namespace dynmo
