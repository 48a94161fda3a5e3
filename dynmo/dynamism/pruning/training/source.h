// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gradual pruning in real training: at every event the smallest weights of all matrices of blocks
// that train go, by one threshold over all ranks (select.h). They are gone for good: products,
// gradients and moments shrink with them, once a matrix is sparse enough to be compressed
// (model/pruned.h).

#include <memory>

#include "dynmo/dynamism/pruning/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Requires valid options.
[[nodiscard]] std::unique_ptr<Source> make_pruning_source(const PruningOptions& options);

}  // namespace dynmo::dynamism
