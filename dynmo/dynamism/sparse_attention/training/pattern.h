// SPDX-License-Identifier: Apache-2.0
#pragma once

// The pairs of tokens that sparse attention computes. (Pagliardini et al., "Faster causal attention
// over large sequences through sparse flash attention", 2023.)

#include <memory>

#include "dynmo/dynamism/sparse_attention/options.h"
#include "dynmo/model/attention_pattern.h"

namespace dynmo::dynamism {

// Makes the pattern of a rule. With kHash, a token's key is its query of norm 1. Each head has
// `buckets` random directions. Tokens whose queries are nearest to the same direction attend to
// each other, but not to themselves. With kDrop, each head drops queries and keys by independent
// draws, a share `dropped` of each.
//
// In training, directions and draws differ for every layer, step and micro-batch. Otherwise each
// layer has one set. So validations are comparable, and the choice for a text does not change while
// it grows. Requires valid options.
[[nodiscard]] std::shared_ptr<const model::AttentionPattern> make_pattern(
    const SparseAttentionOptions& options);

}  // namespace dynmo::dynamism
