// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts entries in an array with a cell for each place. If there is room for the array, this is
// several times as fast as a sort.

#include <optional>
#include <span>

#include "dynmo/tensor/counted_impl.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {

struct CellSums {
  Counted cells;           // entries of each cell that has any
  Counted blocks;          // entries of each block that has any
  Counted cells_of_block;  // cells with entries in each such block
};

// Counts the entries of cells and blocks. A cell is a place in `modes`. A block has all cells that
// share the indices of the first `outer` modes.
//
// Returns nullopt if the array would take more than eight bytes an entry, or if a cell has too many
// entries for its bytes.
[[nodiscard]] std::optional<CellSums> count_cells(const SparseTensor& tensor,
                                                  std::span<const int> modes, std::size_t outer);

}  // namespace dynmo::tensor
