// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dropout whose draws come from core/rng.h, the same numbers wherever a layer runs.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "dynmo/model/layer.h"

namespace dynmo::model {

// Dropout of the given probability with draws from core/rng.h under (state.random_key, step,
// micro-batch, salt): the same numbers wherever the layer runs. Identity when not training or p =
// 0.
[[nodiscard]] at::Tensor dropout(const at::Tensor& input, double p, const LayerState& state,
                                 const LayerContext& context, std::uint64_t salt);

// Which elements dropout keeps, one byte each; undefined where it keeps all of them.
[[nodiscard]] at::Tensor dropout_mask(const at::Tensor& like, double p, const LayerState& state,
                                      const LayerContext& context, std::uint64_t salt);
// x * mask / (1 - p), which is also its gradient; x itself if the mask is undefined.
[[nodiscard]] at::Tensor masked(const at::Tensor& x, const at::Tensor& mask, double p);

}  // namespace dynmo::model
