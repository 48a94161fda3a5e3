// SPDX-License-Identifier: Apache-2.0
#pragma once

// How large a decoder may be, of any family. The limits lie ten times above the largest that were
// trained so far, so that what exceeds one is a slip; below them, to describe and to plan a model
// takes seconds and no memory to speak of.

#include <cstdint>
#include <span>

#include "dynmo/core/expected.h"

namespace dynmo::model {

inline constexpr std::int64_t kMostHidden = std::int64_t{1} << 17;
inline constexpr std::int64_t kMostBlocks = std::int64_t{1} << 12;
inline constexpr std::int64_t kMostIntermediate = std::int64_t{1} << 20;
inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;  // of a vocabulary, a sequence
inline constexpr std::int64_t kMostAngles = std::int64_t{1} << 28;  // of rotary positions

struct SizeLimit {
  const char* key;  // of the [model] table
  std::int64_t value;
  std::int64_t most;
};

// kBadInput naming the key of the first that is not 1 to `most`.
[[nodiscard]] inline Expected<void> check_sizes(std::span<const SizeLimit> sizes) {
  for (const SizeLimit& size : sizes) {
    if (size.value >= 1 && size.value <= size.most) continue;
    return make_error(ErrorCode::kBadInput, "model.{} is {}, wanted 1 to {}", size.key, size.value,
                      size.most);
  }
  return {};
}

}  // namespace dynmo::model
