// SPDX-License-Identifier: Apache-2.0
#pragma once

// The digest of the masks of pruned matrices, which compares runs on any number of ranks.

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

// Returns one digest of the masks of all ranks, equal on all ranks. The distribution and the order
// of matrices do not matter. It is made from the sum of the masks' own digests, which needs a
// message of 40 bytes. A digest of them in their order would need 16 bytes for each matrix,
// gathered. Returns errors of `sum` unchanged.
[[nodiscard]] Expected<Digest> digest_of_masks(std::span<const MatrixMask> masks,
                                               const SumOverRanks& sum);

}  // namespace dynmo::dynamism
