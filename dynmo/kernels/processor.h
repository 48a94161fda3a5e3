// SPDX-License-Identifier: Apache-2.0
#pragma once

// Describes the features of the processor that the bits of a model's numbers depend on.

#include <string>

namespace dynmo::kernels {

// libtorch's instruction set, "AVX512", and whether products are our own for this processor
// (gemm.h), "AVX512, own products".
[[nodiscard]] std::string instruction_set_name();

}  // namespace dynmo::kernels
