// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dynmo/core/expected.h"
#include "dynmo/tensor/features.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {

// Requires a tensor of three modes with values, whose first mode is the steps. kBadInput: more than
// 2^28 rows.
[[nodiscard]] Expected<Unevenness> unevenness_of(const SparseTensor& tensor);

}  // namespace dynmo::tensor
