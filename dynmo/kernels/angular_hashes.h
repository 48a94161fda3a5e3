// SPDX-License-Identifier: Apache-2.0
#pragma once

// Locality-sensitive hashes of queries, for attention that looks at the keys of a query's bucket.
// Dimensions as in operations.h, S directions of a head.

#include <ATen/core/Tensor.h>

namespace dynmo::kernels {

// Angular hashes (Andoni et al., "Practical and optimal LSH for angular distance", 2015): for each
// row the number 0 to 2 S - 1 of that of its head's S directions and their opposites that it points
// along most: 2 s of direction s, 2 s + 1 of its opposite; int32, BHT. Sums are taken in one
// order, so that a row's hash does not depend on the others. directions: fp64, HKS.
[[nodiscard]] at::Tensor angular_hashes(const at::Tensor& x_BTHK, const at::Tensor& directions_HKS);

}  // namespace dynmo::kernels
