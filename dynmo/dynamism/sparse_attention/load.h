// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dynamic sparse attention as a load model. Tokens are hashed into buckets in every forward pass
// and attend within their bucket only. (Pagliardini et al., "Faster causal attention over large
// sequences through sparse flash attention", 2023.) The spread over buckets differs between layers
// and micro-batches, and so does the work of attention's core.

#include <cstdint>
#include <memory>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/sparse_attention/options.h"

namespace dynmo::dynamism {

// Returns the share left of dense causal attention's core: kappa / nb (1 + block nb / s), at most
// 1, with nb = `buckets` and s = `sequence`. A kernel with more work than the dense one is not
// used.
[[nodiscard]] double core_share(double kappa, int buckets, double block, std::int64_t sequence);

// Returns the share left of dense causal attention's core if queries and keys are dropped, each
// with probability `dropped`. It is (1 - dropped)^2, as of the pairs. The overlap of tiles adds the
// factor 1 + block / rows left. At most 1.
[[nodiscard]] double core_share_without(double dropped, double block, std::int64_t sequence);

// Makes the load model. Scales the core of every attention sublayer. The gathers of queries, keys,
// values and outputs add to the moved bytes. Permuted copies and indices add to the stash. Returns
// kBadInput with the field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_sparse_attention(
    const SparseAttentionOptions& options, const LoadInputs& inputs);

}  // namespace dynmo::dynamism
