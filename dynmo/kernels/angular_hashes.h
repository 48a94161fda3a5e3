// SPDX-License-Identifier: Apache-2.0
#pragma once

// Locality-sensitive hashes of queries, for attention in which a query sees only the keys of its
// bucket. Dimensions as in operations.h; a head has S directions.

#include <ATen/core/Tensor.h>

namespace dynmo::kernels {

// Returns angular hashes (Andoni et al., "Practical and optimal LSH for angular distance", 2015) as
// int32, BHT. A row's hash names the vector to which the row is closest, out of its head's S
// directions and their opposites. It is 2 s for direction s and 2 s + 1 for its opposite.
//
// Sums are taken in one order on the CPU, so a row's hash does not depend on other rows.
// `directions_HKS` is fp64, on x's device.
[[nodiscard]] at::Tensor angular_hashes(const at::Tensor& x_BTHK, const at::Tensor& directions_HKS);

}  // namespace dynmo::kernels
