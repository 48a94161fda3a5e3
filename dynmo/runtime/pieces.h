// SPDX-License-Identifier: Apache-2.0
#pragma once

// Splits large transfers into messages of bounded size.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/core/check.h"

namespace dynmo::runtime {

// Largest message of a transfer. Gloo notices a lost peer least reliably in the middle of a large
// message.
inline constexpr std::int64_t kPieceBytes = std::int64_t{1} << 20;

// Returns the bytes of a tensor. Requires a contiguous tensor in host memory; staging.h handles
// others.
[[nodiscard]] inline std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  DYNMO_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "a contiguous tensor in host memory");
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

[[nodiscard]] inline std::vector<std::span<std::byte>> pieces_of(std::span<std::byte> bytes) {
  std::vector<std::span<std::byte>> pieces;
  while (!bytes.empty()) {
    const std::size_t size = std::min(bytes.size(), static_cast<std::size_t>(kPieceBytes));
    pieces.push_back(bytes.first(size));
    bytes = bytes.subspan(size);
  }
  return pieces;
}

}  // namespace dynmo::runtime
