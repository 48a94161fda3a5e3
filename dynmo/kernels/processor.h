// SPDX-License-Identifier: Apache-2.0
#pragma once

// Describes the features of the processor on which the bits of a model's numbers depend.

#include <string>

namespace dynmo::kernels {

// Returns libtorch's instruction set, and whether this processor uses the products of gemm.h:
// "AVX512" or "AVX512, own products".
[[nodiscard]] std::string instruction_set_name();

}  // namespace dynmo::kernels
