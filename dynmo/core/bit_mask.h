// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sets of elements of an array, as bits. Element i is in the set if bit i % 8 of byte i / 8 is set.

#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo {

// Returns the bits of a set. Requires offsets that ascend and are below `elements`, which is below
// 2^31.
[[nodiscard]] std::vector<std::uint8_t> pack_mask(std::span<const std::int32_t> offsets,
                                                  std::int64_t elements);

// Returns the offsets of a set's elements, ascending. Returns kBadInput if the bits, which may come
// from a file, have another size or set a bit behind the last element.
[[nodiscard]] Expected<std::vector<std::int32_t>> unpack_mask(std::span<const std::uint8_t> bits,
                                                              std::int64_t elements);

[[nodiscard]] std::int64_t count_bits(std::span<const std::uint8_t> bits);

}  // namespace dynmo
