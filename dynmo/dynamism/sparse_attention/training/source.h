// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dynamic sparse attention in real training. The attention of every block computes only the pairs
// of tokens that a pattern chooses in each forward pass (pattern.h). Their number differs by layer
// and step. The controller measures it.

#include <memory>

#include "dynmo/dynamism/sparse_attention/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Makes the source. Requires valid options.
[[nodiscard]] std::unique_ptr<Source> make_sparse_attention_source(
    const SparseAttentionOptions& options);

}  // namespace dynmo::dynamism
