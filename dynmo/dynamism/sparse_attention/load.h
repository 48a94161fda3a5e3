// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dynamic sparse attention as a load model: tokens are hashed into buckets anew in every forward
// pass and attend within their bucket only (Pagliardini et al., "Faster causal attention
// over large sequences through sparse flash attention", 2023). How evenly the hash spreads the
// tokens differs between layers and micro-batches, and with it the work of attention's core.

#include <cstdint>
#include <memory>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/sparse_attention/options.h"

namespace dynmo::dynamism {

// Share of dense causal attention's core that is left: kappa / nb (1 + block nb / s), at most 1: a
// kernel that would do more work than the dense one is not taken.
[[nodiscard]] double core_share(double kappa, int buckets, double block, std::int64_t sequence);

// ... where queries and keys are dropped, each with this probability: (1 - dropped)^2 of the pairs,
// and the overlap of as many tiles as rows that are left.
[[nodiscard]] double core_share_without(double dropped, double block, std::int64_t sequence);

// Scales the core of every attention sublayer; adds the gathers of queries, keys, values and
// outputs to the moved bytes, and permuted copies and indices to the stash. kBadInput naming the
// field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_sparse_attention(
    const SparseAttentionOptions& options, const LoadInputs& inputs);

}  // namespace dynmo::dynamism
