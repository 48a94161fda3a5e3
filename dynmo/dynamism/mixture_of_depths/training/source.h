// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mixture of depths in real training: every other block is one layer that works on the tokens its
// router chooses (routed_block.h). Shapes never change, and so neither does the work: blocks are
// cheap and expensive in turn.

#include <memory>

#include "dynmo/dynamism/mixture_of_depths/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Requires valid options.
[[nodiscard]] std::unique_ptr<Source> make_mixture_of_depths_source(
    const MixtureOfDepthsOptions& options);

}  // namespace dynmo::dynamism
