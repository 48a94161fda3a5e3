// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which weights a pruning step leaves: the largest of all matrices together, exactly as many as the
// schedule wants, whichever rank holds which matrix.
//
// The pool is every matrix that is pruned. A weight's key is |w| / std, divided in fp32; std is
// that of its matrix at the start (1: raw magnitude). Keys are compared by their bits, which order
// non-negative floats, so that all ranks find one threshold without rounding. Two rules decide:
//   1. The largest keys of each matrix are protected, so that it never gets sparser than
//      `max_sparsity`. Among equal keys the lower offset is protected.
//   2. Among all other weights the largest keys stay, until the wanted number is reached. Among
//   equal keys the lower (matrix, offset) stays.
// The threshold is found by a radix select: ranks sum up how many keys have each value of the
// highest 11 bits, then of 10 and 10 bits more. Sorting would send all keys; a bisection on a
// float threshold would take some thirty sums and leave the ties open.
//
// A rank sends 16,352 + 8,192 + 8,192 bytes and, where some of the ties at the threshold go, 8 more
// a matrix of the pool: at most 64 KiB up to 4,095 matrices, the 40 bytes of a digest
// (select_mask.h) included. It reads its weights at most seven times and keeps no key.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/pruning/options.h"

namespace dynmo::dynamism {

// The sum over all ranks, element by element. All ranks call it equally often, with equal lengths,
// and get equal numbers or an error.
using SumOverRanks = std::function<Expected<std::vector<std::int64_t>>(std::vector<std::int64_t>)>;

// The request of a pruning step to the pool; equal on all ranks.
struct PruningEvent {
  double sparsity = 0;         // of the pool after it
  double max_sparsity = 0.98;  // of each matrix
  std::int64_t matrices = 0;   // of the pool, on all ranks
  std::int64_t weights = 0;    // of them all at the start
};

// The event of `step` under the schedule of Zhu and Gupta (sparsity_at, load.h).
[[nodiscard]] PruningEvent event_at(const PruningOptions& options, std::int64_t step,
                                    std::int64_t matrices, std::int64_t weights);

// How many weights of `weights` a sparsity leaves: round((1 - sparsity) weights), halves up.
[[nodiscard]] std::int64_t weights_left(double sparsity, std::int64_t weights);

// How many of a matrix's `weights` are protected: the fewest with which its sparsity, divided in
// fp64, is `max_sparsity` at most. So 2 of 100 at 0.98, where rounding up 0.02 * 100 could say 3.
[[nodiscard]] std::int64_t protected_weights(double max_sparsity, std::int64_t weights);

// A matrix that this rank holds.
struct PoolMatrix {
  std::int64_t index = 0;       // in the pool: by layer, then by matrix; no two ranks hold the same
  std::int64_t weights = 0;     // at the start
  float std = 1;                // at the start; above 0 and finite
  std::span<const float> kept;  // the weights that are left, by offset
};

struct Selection {
  // For each matrix given, which of its kept weights stay: ascending positions in `kept`.
  std::vector<std::vector<std::int32_t>> stay;
  // Equal on all ranks, for a record. Every weight above `threshold`, the bits of a key, stays, and
  // so do `ties` of the `tied` unprotected ones equal to it. 0 where all weights stay, the bits of
  // infinity where only protected ones do.
  std::uint32_t threshold = 0;
  std::int64_t ties = 0;
  std::int64_t tied = 0;
  std::int64_t left = 0;  // weights of the pool that stay, on all ranks
};

// Pruned weights stay pruned: where fewer weights are kept than the event asks for, all of them
// stay. `matrices` may be in any order. Errors are equal on all ranks. kBadInput where a key is NaN
// or Inf, naming the first such matrix; where the protected weights are more than the sparsity
// leaves. kInternal where the ranks do not hold the pool. Errors of `sum` come back as they are.
// Requires shares in [0, 1], distinct indices below event.matrices, fewer than 2^31 weights a
// matrix, no more kept than it had.
[[nodiscard]] Expected<Selection> keep_largest(const PruningEvent& event,
                                               std::span<const PoolMatrix> matrices,
                                               const SumOverRanks& sum);

}  // namespace dynmo::dynamism
