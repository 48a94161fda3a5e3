// SPDX-License-Identifier: Apache-2.0
#pragma once

// The masks of a checkpoint's pruned matrices as tensors (tensor/sparse_tensor.h), so that their
// features say how weights are spread.

#include <filesystem>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::checkpoint {

struct Mask {
  std::string name;             // of the matrix
  tensor::SparseTensor places;  // [row, column] of the weights that are left
};

// All masks of a checkpoint's folder, by layer; none where nothing was pruned. kBadInput naming
// file and tensor.
[[nodiscard]] Expected<std::vector<Mask>> read_masks(const std::filesystem::path& checkpoint);

}  // namespace dynmo::checkpoint
