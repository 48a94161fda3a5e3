// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which numbers layers compute in. In bf16 a layer multiplies with copies of its parameters that
// are rounded to bf16 and passes bf16 hidden tensors on, while parameters, gradients and moments
// stay in fp32 (Micikevicius et al., "Mixed precision training", 2018): updates smaller than a
// copy's resolution of 2^-8 add up in the fp32 values until the copy sees them.

#include <c10/core/ScalarType.h>

#include "dynmo/cost/family.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

// Type of the hidden tensors between layers.
[[nodiscard]] at::ScalarType scalar_type(cost::Precision precision);

// The same layers, computing in `precision`: their states carry rounded copies, and what they get
// and give beside the loss is of scalar_type(precision). Works for every layer whose arithmetic
// follows the type of `compute_value(parameter)` (layer.h); an autograd layer's does.
[[nodiscard]] Model in_precision(Model model, cost::Precision precision);

}  // namespace dynmo::model
