// SPDX-License-Identifier: Apache-2.0
#pragma once

// Seeded changes to structured text: JSON, TOML, CSV and schedules are all numbers, words, quoted
// strings and brackets, and it is by those that a reader is led to its far corners.

#include <span>
#include <string>
#include <string_view>

#include "dynmo/core/rng.h"

namespace dynmo::fuzz {

// One to four of: bytes flipped, put in, cut out; a value swapped with another or with an extreme
// one (huge, negative, NaN, of another type, deeply nested); a bracketed part cut out, doubled,
// swapped or moved into itself; a part of `other` put in. At most kMaxBytes long.
inline constexpr std::size_t kMaxBytes = 1 << 14;
[[nodiscard]] std::string mutate(std::string text, std::string_view other, Rng& rng);

}  // namespace dynmo::fuzz
