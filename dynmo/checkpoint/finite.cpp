// SPDX-License-Identifier: Apache-2.0
#include "dynmo/checkpoint/finite.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "dynmo/core/check.h"

namespace dynmo::checkpoint {
namespace {

// NaN and Inf are the numbers whose exponent has all its bits. Elements are copied out, since the
// bytes of a file of other tensors need not be aligned.
template <typename Bits>
std::optional<NotFinite> find(std::span<const std::byte> bytes, Bits exponent) {
  std::array<Bits, 4096> piece;
  NotFinite found;
  const std::size_t elements = bytes.size() / sizeof(Bits);
  for (std::size_t first = 0; first < elements; first += piece.size()) {
    const std::size_t some = std::min(piece.size(), elements - first);
    std::memcpy(piece.data(), bytes.data() + first * sizeof(Bits), some * sizeof(Bits));
    const auto is_not_finite = [&](Bits bits) { return (bits & exponent) == exponent; };
    const auto begin = piece.begin();
    const auto end = begin + static_cast<std::ptrdiff_t>(some);
    const auto count = std::count_if(begin, end, is_not_finite);
    if (count == 0) continue;
    if (found.count == 0) {
      found.first =
          static_cast<std::int64_t>(first) + (std::find_if(begin, end, is_not_finite) - begin);
    }
    found.count += count;
  }
  if (found.count == 0) return std::nullopt;
  return found;
}

}  // namespace

std::optional<NotFinite> find_not_finite(const TensorView& tensor) {
  switch (tensor.dtype) {
    case DType::kF32:
      return find<std::uint32_t>(tensor.bytes, 0x7F800000);
    case DType::kF16:
      return find<std::uint16_t>(tensor.bytes, 0x7C00);
    case DType::kBF16:
      return find<std::uint16_t>(tensor.bytes, 0x7F80);
    default:
      DYNMO_CHECK(false, "F32, F16 or BF16, got {}", name(tensor.dtype));
  }
  return std::nullopt;
}

}  // namespace dynmo::checkpoint
