// SPDX-License-Identifier: Apache-2.0
#pragma once

// The digest of the masks of pruned matrices, by which runs on any number of ranks are compared.

#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/dynamism/pruning/select.h"

namespace dynmo::dynamism {

struct MatrixMask {
  std::int64_t index = 0;          // of the matrix in the pool
  std::int64_t weights = 0;        // of the matrix at the start
  std::vector<std::uint8_t> bits;  // core/bit_mask.h
};

// One digest of the masks of all ranks, whichever rank has which and in whatever order: equal on
// all ranks. It is made of the sum of the masks' own digests, which takes a message of 40 bytes; a
// digest of them in their order would need 16 bytes a matrix, gathered. Errors of `sum` come back
// as they are.
[[nodiscard]] Expected<Digest> digest_of_masks(std::span<const MatrixMask> masks,
                                               const SumOverRanks& sum);

}  // namespace dynmo::dynamism
