// SPDX-License-Identifier: Apache-2.0
#pragma once

// Selects the weights that a pruning step keeps: the largest of all matrices together. Their number
// is exactly that of the schedule, for any distribution of matrices over ranks.
//
// The pool has all pruned matrices. A weight's key is |w| / std, divided in fp32. The std is that
// of its matrix at the start (1: raw magnitude). Keys are compared by their bits, which order
// non-negative floats, so that all ranks find one threshold without rounding. Two rules decide:
//   1. The largest keys of each matrix are protected, so that it never gets sparser than
//      `max_sparsity`. Among equal keys the lower offset is protected.
//   2. Among all other weights the largest keys stay, until the wanted number is reached. Among
//   equal keys the lower (matrix, offset) stays.
// The threshold is found by a radix select. Ranks sum up the number of keys for each value of the
// highest 11 bits, then of 10 and 10 bits more. Sorting would send all keys. A bisection on a float
// threshold would take some thirty sums and leave the ties open.
//
// A rank sends 16,352 + 8,192 + 8,192 bytes. If some of the ties at the threshold are removed, it
// sends 8 more for each matrix of the pool. That is at most 64 KiB up to 4,095 matrices, including
// the 40 bytes of a digest (digest_of_masks). It reads its weights at most seven times and stores
// no keys.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/dynamism/pruning/options.h"

namespace dynmo::dynamism {

// Returns the sum over all ranks, element by element. All ranks call it equally often, with equal
// lengths, and get equal numbers or an error.
using SumOverRanks = std::function<Expected<std::vector<std::int64_t>>(std::vector<std::int64_t>)>;

// The request of a pruning step to the pool. Equal on all ranks.
struct PruningEvent {
  double sparsity = 0;         // of the pool after it
  double max_sparsity = 0.98;  // of each matrix
  std::int64_t matrices = 0;   // of the pool, on all ranks
  std::int64_t weights = 0;    // of them all at the start
};

// Returns the event of `step` under the schedule of Zhu and Gupta (sparsity_at, load.h).
[[nodiscard]] PruningEvent event_at(const PruningOptions& options, std::int64_t step,
                                    std::int64_t matrices, std::int64_t weights);

// Returns the number of weights that a sparsity leaves: round((1 - sparsity) weights), halves up.
[[nodiscard]] std::int64_t weights_left(double sparsity, std::int64_t weights);

// Returns the number of protected weights of a matrix. It is the smallest with which the matrix's
// sparsity, divided in fp64, is at most `max_sparsity`. So it is 2 of 100 at 0.98, while rounding
// up 0.02 * 100 could give 3.
[[nodiscard]] std::int64_t protected_weights(double max_sparsity, std::int64_t weights);

// A matrix that this rank holds.
struct PoolMatrix {
  std::int64_t index = 0;       // in the pool: by layer, then by matrix; no two ranks hold the same
  std::int64_t weights = 0;     // at the start
  float std = 1;                // at the start; above 0 and finite
  std::span<const float> kept;  // kept weights, by offset
};

struct Selection {
  // For each given matrix, the kept weights that stay: ascending positions in `kept`.
  std::vector<std::vector<std::int32_t>> stay;
  // Equal on all ranks, for a record. Every weight above `threshold`, the bits of a key, stays. So
  // do `ties` of the `tied` unprotected ones equal to it. The threshold is 0 if all weights stay,
  // and the bits of infinity if only protected ones do.
  std::uint32_t threshold = 0;
  std::int64_t ties = 0;
  std::int64_t tied = 0;
  std::int64_t left = 0;  // weights of the pool that stay, on all ranks
};

// Selects the weights that stay. Pruned weights stay pruned: if fewer weights are kept than the
// event asks for, all of them stay. `matrices` may be in any order. Errors are equal on all ranks.
// Returns kBadInput if a key is NaN or Inf, with the first such matrix. Also returns it if more
// weights are protected than the sparsity leaves. Returns kInternal if the ranks do not hold the
// pool, and errors of `sum` unchanged.
//
// Requires shares in [0, 1], distinct indices below event.matrices, and fewer than 2^31 weights in
// a matrix. No matrix keeps more than it had.
[[nodiscard]] Expected<Selection> keep_largest(const PruningEvent& event,
                                               std::span<const PoolMatrix> matrices,
                                               const SumOverRanks& sum);

// The mask of a matrix. A digest of all masks compares runs on any number of ranks.
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
