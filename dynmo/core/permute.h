// SPDX-License-Identifier: Apache-2.0
#pragma once

// Permutations as a function of a key, so that no list of images is stored.

#include <cstdint>

namespace dynmo {

// Returns the image of `index` under the permutation of [0, size) that `key` names. Requires 0 <=
// index < size. Takes less than a microsecond.
[[nodiscard]] std::uint64_t permute(std::uint64_t index, std::uint64_t size, std::uint64_t key);

}  // namespace dynmo
