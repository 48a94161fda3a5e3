// SPDX-License-Identifier: Apache-2.0
#pragma once

// Describes the features of the processor on which the bits of a model's numbers depend.

#include <string>

namespace dynmo::kernels {

// Returns libtorch's instruction set, the features of the processor that choose the code of other
// kernels, and whether it uses the products of gemm.h: "AVX2 (intel avx2 fma avx512f), own
// products". Libtorch's set follows ATEN_CPU_CAPABILITY, and the features do not.
[[nodiscard]] std::string instruction_set_name();

}  // namespace dynmo::kernels
