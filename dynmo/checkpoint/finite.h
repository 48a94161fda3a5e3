// SPDX-License-Identifier: Apache-2.0
#pragma once

// Finds NaN and Inf in the weights of a file. So a damaged model is refused by name, instead of
// giving text and losses that mean nothing.

#include <cstdint>
#include <optional>

#include "dynmo/checkpoint/safetensors.h"

namespace dynmo::checkpoint {

struct NotFinite {
  std::int64_t first = 0;  // index of the first such element
  std::int64_t count = 0;
};
// Reads the whole tensor. Returns nullopt if all its elements are finite. Requires F32, F16 or
// BF16.
[[nodiscard]] std::optional<NotFinite> find_not_finite(const TensorView& tensor);

}  // namespace dynmo::checkpoint
