// SPDX-License-Identifier: Apache-2.0
#pragma once

// A sparse tensor in coordinates. Dynamic loads are such tensors: counts of tokens by [step, block,
// expert], costs by [step, layer], traffic by [step, from, to].

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dynmo::tensor {

inline constexpr int kMaxOrder = 16;
inline constexpr std::uint64_t kMaxSize = std::uint64_t{1} << 32;  // size of a mode

struct SparseTensor {
  std::vector<std::uint64_t> sizes;                 // by mode
  std::vector<std::string> names = {};              // by mode; empty if modes have numbers only
  std::vector<std::vector<std::uint32_t>> indices;  // by mode, then by entry; from 0
  std::vector<double> values = {};                  // by entry; empty if only places count

  [[nodiscard]] int order() const { return static_cast<int>(sizes.size()); }
  [[nodiscard]] std::size_t entries() const { return indices.empty() ? 0 : indices.front().size(); }
};

}  // namespace dynmo::tensor
