// SPDX-License-Identifier: Apache-2.0
#pragma once

// A recorded load as a tensor (tensor/sparse_tensor.h), whose features describe its imbalance.

#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/moe/load_counts.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::dynamism {

// Returns the seconds of F, I and W of a micro-batch by [recorded step, layer]. Requires recorded
// steps.
[[nodiscard]] tensor::SparseTensor tensor_of(const LoadModel& recorded);
// Returns the tokens by [recorded step, block, expert].
[[nodiscard]] tensor::SparseTensor tensor_of(const RecordedCounts& counts);

}  // namespace dynmo::dynamism
