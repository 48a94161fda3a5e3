// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/bit_mask.h"

#include <bit>
#include <cstddef>
#include <limits>

#include "dynmo/core/check.h"

namespace dynmo {
namespace {

std::size_t mask_bytes(std::int64_t elements) {
  DYNMO_CHECK(elements >= 0 && elements <= std::numeric_limits<std::int32_t>::max(),
              "0 to 2^31 - 1 elements, got {}", elements);
  return static_cast<std::size_t>((elements + 7) / 8);
}

}  // namespace

std::vector<std::uint8_t> pack_mask(std::span<const std::int32_t> offsets, std::int64_t elements) {
  std::vector<std::uint8_t> bits(mask_bytes(elements));
  std::int64_t before = -1;
  for (const std::int32_t offset : offsets) {
    DYNMO_CHECK(offset > before && offset < elements, "an offset above {} and below {}, got {}",
                before, elements, offset);
    std::uint8_t& byte = bits[static_cast<std::size_t>(offset / 8)];
    byte = static_cast<std::uint8_t>(byte | 1U << offset % 8);
    before = offset;
  }
  return bits;
}

Expected<std::vector<std::int32_t>> unpack_mask(std::span<const std::uint8_t> bits,
                                                std::int64_t elements) {
  if (bits.size() != mask_bytes(elements)) {
    return make_error(ErrorCode::kBadInput, "a mask of {} bytes, wanted {} for {} elements",
                      bits.size(), mask_bytes(elements), elements);
  }
  if (elements % 8 != 0 && bits.back() >> elements % 8 != 0) {
    return make_error(ErrorCode::kBadInput,
                      "a mask of {} elements has bits behind them, wanted zeros", elements);
  }
  std::vector<std::int32_t> offsets;
  offsets.reserve(static_cast<std::size_t>(count_bits(bits)));
  for (std::size_t byte = 0; byte < bits.size(); ++byte) {
    for (unsigned rest = bits[byte]; rest != 0; rest &= rest - 1) {
      offsets.push_back(static_cast<std::int32_t>(byte) * 8 + std::countr_zero(rest));
    }
  }
  return offsets;
}

std::int64_t count_bits(std::span<const std::uint8_t> bits) {
  std::int64_t count = 0;
  for (const std::uint8_t byte : bits) count += std::popcount(byte);
  return count;
}

}  // namespace dynmo
