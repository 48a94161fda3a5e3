// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dynamic sparse attention in real training: the attention of every block looks at the pairs of
// tokens that a pattern chooses in each forward pass (pattern.h), and works on them alone. How many
// they are is another number for every layer and step, which the controller finds by measuring.

#include <memory>

#include "dynmo/dynamism/sparse_attention/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Requires valid options.
[[nodiscard]] std::unique_ptr<Source> make_sparse_attention_source(
    const SparseAttentionOptions& options);

}  // namespace dynmo::dynamism
