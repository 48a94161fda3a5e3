// SPDX-License-Identifier: Apache-2.0
#pragma once

// The messages of a run as a tensor (tensor/sparse_tensor.h), so that its features say how they are
// uneven.

#include <vector>

#include "dynmo/observe/traffic_log.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::observe {

// Measured bytes by [interval, from, to], control left out. Requires an interval.
[[nodiscard]] tensor::SparseTensor tensor_of(const std::vector<TrafficInterval>& intervals);

}  // namespace dynmo::observe
