// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which pairs of tokens sparse attention looks at (Pagliardini et al., "Faster causal attention
// over large sequences through sparse flash attention", 2023).

#include <memory>

#include "dynmo/dynamism/sparse_attention/options.h"
#include "dynmo/model/attention_pattern.h"

namespace dynmo::dynamism {

// kHash: a token's key is its query of norm 1, and each head attends within its buckets of tokens
// whose queries point along the same of `buckets` random directions, a token not to itself. kDrop:
// each head leaves out queries and keys by independent draws, a share `dropped` of each.
// In training, directions and draws are other ones for every layer, step and micro-batch; outside
// of it they are one for each layer, so that a validation is compared with the one before, and
// what is chosen of a text does not change while it grows.
// Requires valid options.
[[nodiscard]] std::shared_ptr<const model::AttentionPattern> make_pattern(
    const SparseAttentionOptions& options);

}  // namespace dynmo::dynamism
