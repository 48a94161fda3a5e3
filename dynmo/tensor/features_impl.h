// SPDX-License-Identifier: Apache-2.0
#pragma once

// Parts of features_of().

#include <optional>
#include <span>

#include "dynmo/core/expected.h"
#include "dynmo/tensor/counted_impl.h"
#include "dynmo/tensor/features.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {

// Computes the persistence along a mode of the tensor. An entry without a value counts 1. Fails
// like features_of().
[[nodiscard]] Expected<Persistence> persistence_of(const SparseTensor& tensor, int mode);

// Computes the unevenness of a tensor. Requires values and three modes, the steps first. Returns
// kBadInput for more than 2^28 rows.
[[nodiscard]] Expected<Unevenness> unevenness_of(const SparseTensor& tensor);

struct CellSums {
  Counted cells;           // entries of each cell that has any
  Counted blocks;          // entries of each block that has any
  Counted cells_of_block;  // cells with entries in each such block
};

// Counts the entries of cells and blocks in an array with a cell for each place. If there is room
// for the array, this is several times as fast as a sort. A cell is a place in `modes`. A block has
// all cells that share the indices of the first `outer` modes.
//
// Returns nullopt if the array would take more than eight bytes an entry, or if a cell has too many
// entries for its bytes.
[[nodiscard]] std::optional<CellSums> count_cells(const SparseTensor& tensor,
                                                  std::span<const int> modes, std::size_t outer);

}  // namespace dynmo::tensor
