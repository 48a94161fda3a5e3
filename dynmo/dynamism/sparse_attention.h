// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dynamic sparse attention as a load model: queries and keys are hashed into buckets anew in every
// forward pass and attend within their bucket only (Pagliardini et al., "Faster causal attention
// over large sequences through sparse flash attention", 2023). How evenly the hash spreads the
// tokens differs between layers and micro-batches, and with it the work of attention's core.

#include <cstdint>
#include <memory>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"

namespace dynmo::dynamism {

struct SparseAttentionParameters {
  int buckets = 16;  // nb; the paper's experiments take 8, 16 and 32
  // Skew kappa = nb sum_u (n_u / s)^2, from 1 (even buckets) to nb (one bucket), as its logarithm
  // to base nb: drawn uniformly for every layer between these two.
  double least_skew = 0;
  double most_skew = 0.7;
  double drift = 0.1;               // deviation of a layer's skew (in the same unit) around its own
  std::int64_t drift_steps = 500;   // ... which has changed wholly after this many steps
  double micro_batch_noise = 0.05;  // deviation of the skew between micro-batches
  int sampled_micro_batches = 8;    // whose mean is the cost of a step
  double block = 128;               // edge of the kernel's tiles
};

// Share of dense causal attention's core that is left: kappa / nb (1 + block nb / s), at most 1: a
// kernel that would do more work than the dense one is not taken.
[[nodiscard]] double core_share(double kappa, int buckets, double block, std::int64_t sequence);

// Scales the core of every attention half block; adds the gathers of queries, keys, values and
// outputs to the moved bytes, and permuted copies and indices to the stash. kBadInput naming the
// field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_sparse_attention(
    const SparseAttentionParameters& parameters, const LoadInputs& inputs);

}  // namespace dynmo::dynamism
