// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mixture of depths in real training. Every other block is one layer that works on the tokens that
// its router chooses (routed_block.h). Shapes and work never change: cheap and expensive blocks
// alternate.

#include <memory>

#include "dynmo/dynamism/mixture_of_depths/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Makes the source. Requires valid options.
[[nodiscard]] std::unique_ptr<Source> make_mixture_of_depths_source(
    const MixtureOfDepthsOptions& options);

}  // namespace dynmo::dynamism
