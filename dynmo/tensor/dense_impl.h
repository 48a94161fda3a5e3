// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts entries in an array with a cell for each place. Where there is room for the array this is
// several times as fast as a sort.

#include <optional>
#include <span>

#include "dynmo/tensor/counted_impl.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {

struct CellSums {
  Counted cells;           // entries of each cell that has any
  Counted blocks;          // entries of each block that has any
  Counted cells_of_block;  // cells with entries, of each such block
};

// A cell is a place in `modes`, a block has all cells with the same indices in the first `outer` of
// them. nullopt: the array would take more than eight bytes an entry, or a cell has too many
// entries for its bytes.
[[nodiscard]] std::optional<CellSums> count_cells(const SparseTensor& tensor,
                                                  std::span<const int> modes, std::size_t outer);

}  // namespace dynmo::tensor
