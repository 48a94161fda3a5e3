// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads the masks of a checkpoint's pruned matrices as tensors (tensor/sparse_tensor.h). Their
// features describe the distribution of the kept weights.

#include <filesystem>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::checkpoint {

struct Mask {
  std::string name;             // name of the matrix
  tensor::SparseTensor places;  // [row, column] of the remaining weights
};

// Returns the masks of all matrices of a checkpoint's folder, by layer, or none if nothing was
// pruned. Masks of biases are left out. Fails with kBadInput and the names of file and tensor.
[[nodiscard]] Expected<std::vector<Mask>> read_masks(const std::filesystem::path& checkpoint);

}  // namespace dynmo::checkpoint
