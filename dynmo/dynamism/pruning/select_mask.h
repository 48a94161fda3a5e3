// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks of pruned matrices as bits, for checkpoints, and their digest, by which runs on any number
// of ranks are compared: weight i of a matrix is kept where bit i % 8 of byte i / 8 is set.

#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/dynamism/pruning/select.h"

namespace dynmo::dynamism {

// Requires offsets that ascend and are below `weights`, the size of the matrix.
[[nodiscard]] std::vector<std::uint8_t> pack_mask(std::span<const std::int32_t> offsets,
                                                  std::int64_t weights);

// The offsets of a mask's kept weights, ascending. kBadInput where the bits, which may come from a
// file, are not those of a matrix of `weights` weights.
[[nodiscard]] Expected<std::vector<std::int32_t>> unpack_mask(std::span<const std::uint8_t> bits,
                                                              std::int64_t weights);

struct MatrixMask {
  std::int64_t index = 0;    // of the matrix in the pool
  std::int64_t weights = 0;  // of the matrix at the start
  std::vector<std::uint8_t> bits;
};

// One digest of the masks of all ranks, whichever rank has which and in whatever order: equal on
// all ranks. It is made of the sum of the masks' own digests, which takes a message of 40 bytes; a
// digest of them in their order would need 16 bytes a matrix, gathered. Errors of `sum` come back
// as they are.
[[nodiscard]] Expected<Digest> digest_of_masks(std::span<const MatrixMask> masks,
                                               const SumOverRanks& sum);

}  // namespace dynmo::dynamism
