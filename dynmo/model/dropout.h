// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dropout with draws from core/rng.h, which are the same wherever a layer runs.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "dynmo/model/layer.h"

namespace dynmo::model {

// Applies dropout of probability p. The draws are those of core/rng.h under (state.random_key,
// step, micro-batch, salt). Returns the input if the layer is not training or p = 0.
[[nodiscard]] at::Tensor dropout(const at::Tensor& input, double p, const LayerState& state,
                                 const LayerContext& context, std::uint64_t salt);

// Returns one byte for each element, which is 0 if dropout drops it. Returns an undefined tensor if
// dropout keeps all.
[[nodiscard]] at::Tensor dropout_mask(const at::Tensor& like, double p, const LayerState& state,
                                      const LayerContext& context, std::uint64_t salt);
// Returns x * mask / (1 - p), which is also its gradient, or x itself if the mask is undefined.
[[nodiscard]] at::Tensor masked(const at::Tensor& x, const at::Tensor& mask, double p);

}  // namespace dynmo::model
