// SPDX-License-Identifier: Apache-2.0
#pragma once

// The precision in which layers compute. In bf16 a layer multiplies with copies of its parameters,
// rounded to bf16, and passes on bf16 hidden tensors. Parameters, gradients and moments stay in
// fp32 (Micikevicius et al., "Mixed precision training", 2018). So updates smaller than a copy's
// resolution of 2^-8 accumulate in the fp32 values until the copy changes.

#include <c10/core/ScalarType.h>

#include "dynmo/cost/family.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

// Returns the type of the hidden tensors between layers.
[[nodiscard]] at::ScalarType scalar_type(cost::Precision precision);

// Returns the same layers, computing in `precision`. Their states hold rounded copies. Their inputs
// and outputs, except for the loss, have the type scalar_type(precision). Works for every layer
// whose arithmetic follows the type of `compute_value(parameter)` (layer.h), such as an autograd
// layer.
[[nodiscard]] Model in_precision(Model model, cost::Precision precision);

}  // namespace dynmo::model
