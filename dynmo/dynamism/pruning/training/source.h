// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gradual pruning in real training. At every event the smallest weights of all matrices of training
// blocks are removed. One threshold over all ranks selects them (select.h). They never return. Once
// a matrix is sparse enough to be compressed, its products, gradients and moments shrink
// (model/pruned.h).

#include <memory>

#include "dynmo/dynamism/pruning/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Makes the source. Requires valid options.
[[nodiscard]] std::unique_ptr<Source> make_pruning_source(const PruningOptions& options);

}  // namespace dynmo::dynamism
