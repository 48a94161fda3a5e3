// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/pruning/select_mask.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::dynamism {
namespace {

std::size_t mask_bytes(std::int64_t weights) {
  DYNMO_CHECK(weights >= 0 && weights <= std::numeric_limits<std::int32_t>::max(),
              "0 to 2^31 - 1 weights of a matrix, got {}", weights);
  return static_cast<std::size_t>((weights + 7) / 8);
}

}  // namespace

std::vector<std::uint8_t> pack_mask(std::span<const std::int32_t> offsets, std::int64_t weights) {
  std::vector<std::uint8_t> bits(mask_bytes(weights));
  std::int64_t before = -1;
  for (const std::int32_t offset : offsets) {
    DYNMO_CHECK(offset > before && offset < weights, "an offset above {} and below {}, got {}",
                before, weights, offset);
    std::uint8_t& byte = bits[static_cast<std::size_t>(offset / 8)];
    byte = static_cast<std::uint8_t>(byte | 1U << offset % 8);
    before = offset;
  }
  return bits;
}

Expected<std::vector<std::int32_t>> unpack_mask(std::span<const std::uint8_t> bits,
                                                std::int64_t weights) {
  if (bits.size() != mask_bytes(weights)) {
    return make_error(ErrorCode::kBadInput, "a mask of {} bytes, wanted {} for {} weights",
                      bits.size(), mask_bytes(weights), weights);
  }
  if (weights % 8 != 0 && bits.back() >> weights % 8 != 0) {
    return make_error(ErrorCode::kBadInput,
                      "a mask of {} weights has bits behind them, wanted zeros", weights);
  }
  std::vector<std::int32_t> offsets;
  for (std::size_t byte = 0; byte < bits.size(); ++byte) {
    for (unsigned rest = bits[byte]; rest != 0; rest &= rest - 1) {
      offsets.push_back(static_cast<std::int32_t>(byte) * 8 + std::countr_zero(rest));
    }
  }
  return offsets;
}

Expected<Digest> digest_of_masks(std::span<const MatrixMask> masks, const SumOverRanks& sum) {
  constexpr std::uint64_t kPart = 0xFFFFFFFF;  // parts of 32 bits, so that no sum overflows
  std::array<std::uint64_t, 5> sums = {masks.size(), 0, 0, 0, 0};
  for (const MatrixMask& mask : masks) {
    const std::array<std::int64_t, 2> shape = {mask.index, mask.weights};
    Digester digester;
    digester.update(std::as_bytes(std::span(shape)));
    digester.update(std::as_bytes(std::span(mask.bits)));
    const auto [high, low] = digester.digest();
    sums[1] += high >> 32;
    sums[2] += high & kPart;
    sums[3] += low >> 32;
    sums[4] += low & kPart;
  }
  std::vector<std::int64_t> message;
  for (const std::uint64_t part : sums) message.push_back(static_cast<std::int64_t>(part & kPart));
  DYNMO_ASSIGN(const std::vector<std::int64_t> all, sum(std::move(message)));
  DYNMO_CHECK(all.size() == sums.size(), "a sum of {} numbers, got {}", sums.size(), all.size());
  std::transform(all.begin(), all.end(), sums.begin(),
                 [](std::int64_t part) { return static_cast<std::uint64_t>(part) & kPart; });
  return digest_of(std::as_bytes(std::span(sums)));
}

}  // namespace dynmo::dynamism
