// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the bits of a model's numbers depend on of the processor.

#include <string>

namespace dynmo::model {

// libtorch's instruction set, "AVX512", and whether products are our own for this processor
// (gemm_impl.h), "AVX512, own products".
[[nodiscard]] std::string instruction_set_name();

}  // namespace dynmo::model
