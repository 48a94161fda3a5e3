// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mixture of depths as a load model (Raposo et al. 2024): every other block works on the C tokens
// of a sequence that its router scores highest, the others pass by. Shapes are static, so the
// imbalance is too: cheap and expensive blocks in turn, which any stage with an even number of
// blocks evens out by itself.

#include <memory>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/mixture_of_depths/options.h"

namespace dynmo::dynamism {

// A routed block: products x C / s, attention's core x (C / s)^2, router and predictor on all
// tokens, gather and scatter of the chosen ones; stash x C / s and the residual stream that the
// others take. Weights stay, so routed blocks are cheap but heavy. kBadInput naming the field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_mixture_of_depths(
    const MixtureOfDepthsOptions& options, const LoadInputs& inputs);

}  // namespace dynmo::dynamism
