// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dynmo/core/expected.h"
#include "dynmo/tensor/features.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {

// Computes the persistence along a mode of the tensor. An entry without a value counts 1. Fails
// like features_of().
[[nodiscard]] Expected<Persistence> persistence_of(const SparseTensor& tensor, int mode);

}  // namespace dynmo::tensor
