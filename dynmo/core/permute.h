// SPDX-License-Identifier: Apache-2.0
#pragma once

// Permutations as a function of a key, so that no list of images is ever held.

#include <cstdint>

namespace dynmo {

// The image of `index` under the permutation of [0, size) that `key` names. Requires 0 <= index <
// size. Under a microsecond.
[[nodiscard]] std::uint64_t permute(std::uint64_t index, std::uint64_t size, std::uint64_t key);

}  // namespace dynmo
