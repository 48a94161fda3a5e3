// SPDX-License-Identifier: Apache-2.0
#pragma once

// Seeded damage to a file's bytes, of the kinds that disks, copies and users do.

#include <cstdint>
#include <string>

#include "dynmo/core/rng.h"

namespace dynmo {

// One to four of: a flipped bit, a new byte, an extreme 8-byte number, bytes cut out, bytes
// doubled, a cut end, more bytes at the end.
inline std::string mutate(std::string bytes, Rng& rng) {
  const auto edits = 1 + rng.below(4);
  for (std::uint64_t edit = 0; edit < edits && !bytes.empty(); ++edit) {
    const auto at = static_cast<std::size_t>(rng.below(bytes.size()));
    const auto some = static_cast<std::size_t>(1 + rng.below(16));
    switch (rng.below(7)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << rng.below(8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(rng.below(256));
        break;
      case 2: {
        const std::uint64_t extremes[] = {0, ~0ULL, 1ULL << 63, (1ULL << 63) - 1, 1ULL << 32};
        const std::uint64_t value = extremes[rng.below(5)];
        for (std::size_t i = 0; i < 8 && at + i < bytes.size(); ++i) {
          bytes[at + i] = static_cast<char>(value >> (8 * i));
        }
        break;
      }
      case 3:
        bytes.erase(at, some);
        break;
      case 4:
        bytes.insert(at, bytes.substr(at, some));
        break;
      case 5:
        bytes.resize(at);
        break;
      default:
        bytes.append(some, static_cast<char>(rng.below(256)));
    }
  }
  return bytes;
}

}  // namespace dynmo
