// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dynamic sparse attention: its keys, one table for a training and for a scenario.

#include <cstdint>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/source_key.h"

namespace dynmo::dynamism {

enum class SparseRule {
  kHash,  // within buckets of tokens that hash alike
  kDrop,  // of queries and keys that are not dropped
};

struct SparseAttentionOptions {
  SparseRule rule = SparseRule::kHash;
  int buckets = 16;  // nb; the paper's experiments take 8, 16 and 32; 1, or an even number
  // Share of the queries, and of the keys, that each head leaves out; the paper's experiments take
  // 0.3, 0.5 and 0.7.
  double dropped = 0.5;
  // Skew kappa = nb sum_u (n_u / s)^2, from 1 (even buckets) to nb (one bucket), as its logarithm
  // to base nb: drawn uniformly for every layer between these two.
  double min_skew = 0;
  double max_skew = 0.7;
  double drift = 0.1;               // std of a layer's skew (in the same unit) around its own
  std::int64_t drift_steps = 500;   // ... which has changed wholly after this many steps
  double micro_batch_noise = 0.05;  // std of the skew between micro-batches
  int sampled_micro_batches = 8;    // whose mean is the cost of a step
  double block = 128;               // edge of the kernel's tiles
};

[[nodiscard]] std::vector<SourceKey> keys_of(SparseAttentionOptions& options);
// kBadInput naming the key: a value outside its range, min_skew above max_skew, an odd number of
// buckets.
[[nodiscard]] Expected<void> check(const SparseAttentionOptions& options);

}  // namespace dynmo::dynamism
