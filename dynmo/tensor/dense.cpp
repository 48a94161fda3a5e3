// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "dynmo/tensor/features_impl.h"

namespace dynmo::tensor {
namespace {

constexpr std::size_t kBytesAnEntry = 8;
constexpr std::size_t kFewCells = std::size_t{1} << 16;  // always allowed
constexpr std::size_t kAtOnce = 1024;  // entries whose cells are computed together

// Returns the number of cells, or `limit` + 1 if it is above `limit`.
std::size_t cells_of(const SparseTensor& tensor, std::span<const int> modes, std::size_t limit) {
  std::size_t cells = 1;
  for (const int mode : modes) {
    const std::uint64_t size = tensor.sizes[static_cast<std::size_t>(mode)];
    if (size > limit / cells) return limit + 1;
    cells *= size;
  }
  return cells;
}

template <typename Cell>
std::optional<CellSums> count_in(const SparseTensor& tensor, std::span<const int> modes,
                                 std::size_t cells, std::size_t block) {
  std::vector<Cell> counts(cells);
  std::array<std::size_t, kAtOnce> at{};
  for (std::size_t begin = 0; begin < tensor.entries(); begin += kAtOnce) {
    const std::size_t entries = std::min(kAtOnce, tensor.entries() - begin);
    std::fill_n(at.begin(), entries, 0);
    for (const int mode : modes) {
      const auto m = static_cast<std::size_t>(mode);
      const std::uint64_t size = tensor.sizes[m];
      const std::uint32_t* index = tensor.indices[m].data() + begin;
      for (std::size_t i = 0; i < entries; ++i) at[i] = at[i] * size + index[i];
    }
    for (std::size_t i = 0; i < entries; ++i) {
      if (++counts[at[i]] == 0) return std::nullopt;
    }
  }
  CellSums sums;
  for (std::size_t begin = 0; begin < cells; begin += block) {
    std::uint64_t entries = 0;
    std::uint64_t nonempty = 0;
    for (std::size_t i = begin; i < begin + block; ++i) {
      if (counts[i] == 0) continue;
      sums.cells.add(counts[i]);
      entries += counts[i];
      ++nonempty;
    }
    if (nonempty == 0) continue;
    sums.blocks.add(entries);
    sums.cells_of_block.add(nonempty);
  }
  return sums;
}

}  // namespace

std::optional<CellSums> count_cells(const SparseTensor& tensor, std::span<const int> modes,
                                    std::size_t outer) {
  const std::size_t bytes = kBytesAnEntry * tensor.entries();
  const std::size_t limit = std::max(kFewCells, bytes / sizeof(std::uint16_t));
  const std::size_t cells = cells_of(tensor, modes, limit);
  if (cells > limit) return std::nullopt;
  const std::size_t block = cells_of(tensor, modes.subspan(outer), limit);
  const bool has_room = cells <= std::max(kFewCells, bytes / sizeof(std::uint32_t));
  if (has_room && tensor.entries() <= std::numeric_limits<std::uint32_t>::max()) {
    return count_in<std::uint32_t>(tensor, modes, cells, block);
  }
  return count_in<std::uint16_t>(tensor, modes, cells, block);
}

}  // namespace dynmo::tensor
