// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mixture of depths as a load model (Raposo et al. 2024). Every other block works only on C of the
// s tokens of a sequence, those with the highest scores of its router. Shapes are static, so the
// imbalance is too. Cheap and expensive blocks alternate, so any stage with an even number of
// blocks is balanced.

#include <memory>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/mixture_of_depths/options.h"

namespace dynmo::dynamism {

// Makes the load model. In a routed block, products and stash are C / s of the dense ones, and
// attention's core is (C / s)^2. Router and predictor run on all tokens, and the chosen ones are
// gathered and scattered. The stash also has the residual stream of the other tokens. Weights stay,
// so routed blocks are fast but need full memory. Returns kBadInput with the field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_mixture_of_depths(
    const MixtureOfDepthsOptions& options, const LoadInputs& inputs);

}  // namespace dynmo::dynamism
