// SPDX-License-Identifier: Apache-2.0
#pragma once

// The messages of a run as a tensor (tensor/sparse_tensor.h), whose features describe their
// imbalance.

#include <vector>

#include "dynmo/observe/traffic_log.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::observe {

// Returns measured bytes by [interval, from, to] without control. Requires an interval.
[[nodiscard]] tensor::SparseTensor tensor_of(const std::vector<TrafficInterval>& intervals);

}  // namespace dynmo::observe
