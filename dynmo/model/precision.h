// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which numbers layers compute in. In bf16 a layer multiplies with copies of its parameters that
// are rounded to bf16 and passes bf16 hidden tensors on, while parameters, gradients and moments
// stay in fp32 (Micikevicius et al., "Mixed precision training", 2018): updates smaller than a
// copy's resolution of 2^-8 add up in the fp32 values until the copy sees them.

#include <c10/core/ScalarType.h>

#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

enum class Precision { kFp32, kBf16 };

// "fp32", "bf16". kBadInput naming the known ones.
[[nodiscard]] Expected<Precision> parse_precision(std::string_view name);

// Type of the hidden tensors between layers.
[[nodiscard]] at::ScalarType scalar_type(Precision precision);

// The same layers, computing in `precision`: their states carry rounded copies, and what they get
// and give beside the loss is of scalar_type(precision). Works for every layer whose arithmetic
// follows the type of `compute_value(parameter)` (layer.h); an autograd layer's does.
[[nodiscard]] Model in_precision(Model model, Precision precision);

}  // namespace dynmo::model
