// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys of dynamic sparse attention, one table for a training and for a scenario.

#include <cstdint>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/source_entry.h"
#include "dynmo/dynamism/source_key.h"

namespace dynmo::dynamism {

enum class SparseRule {
  kHash,  // within buckets of tokens with equal hashes
  kDrop,  // between queries and keys that are not dropped
};

struct SparseAttentionOptions {
  SparseRule rule = SparseRule::kHash;
  int buckets = 16;  // nb: 1, or an even number; the paper's experiments use 8, 16 and 32
  // Share of the queries, and of the keys, that each head drops. The paper's experiments use 0.3,
  // 0.5 and 0.7.
  double dropped = 0.5;
  // Skew kappa = nb sum_u (n_u / s)^2, from 1 (even buckets) to nb (one bucket). It is given as its
  // logarithm to base nb, drawn uniformly for every layer between these two.
  double min_skew = 0;
  double max_skew = 0.7;
  double drift = 0.1;               // std of a layer's skew (in the same unit) around its own
  std::int64_t drift_steps = 500;   // steps after which that has changed completely
  double micro_batch_noise = 0.05;  // std of the skew between micro-batches
  int sampled_micro_batches = 8;    // their mean is the cost of a step
  double block = 128;               // edge of the kernel's tiles
};

[[nodiscard]] std::vector<SourceKey> keys_of(SparseAttentionOptions& options);
// Checks the values. Returns kBadInput for a key outside its range, for min_skew above max_skew,
// and for an odd number of buckets.
[[nodiscard]] Expected<void> check(const SparseAttentionOptions& options);
// Returns kBadInput for the rule `drop` on a device.
[[nodiscard]] Expected<void> check_training(const SparseAttentionOptions& options,
                                            const TrainingSetting& setting);

}  // namespace dynmo::dynamism
