// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/pruning/select_mask.h"

#include <algorithm>
#include <array>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::dynamism {
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
