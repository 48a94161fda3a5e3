// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dynmo/core/expected.h"
#include "dynmo/tensor/features.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {

// Computes the unevenness of a tensor. Requires values and three modes, the steps first. Returns
// kBadInput for more than 2^28 rows.
[[nodiscard]] Expected<Unevenness> unevenness_of(const SparseTensor& tensor);

}  // namespace dynmo::tensor
