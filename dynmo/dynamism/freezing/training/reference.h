// SPDX-License-Identifier: Apache-2.0
#pragma once

// A reference is a layer at an earlier step, whose outputs are compared with its present ones
// (plasticity.h). It is a copy of the layer's parameters in the buffers of its state. So it moves
// with the layer, is in its checkpoint and part of its digest. A matrix takes int8 and a scale for
// each row, a quarter of its bytes. A vector is copied unchanged. Egeria's reference model is
// quantised in the same way.

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "dynmo/model/layer.h"

namespace dynmo::dynamism {

// A matrix by rows. The product values[i][j] * scales[i] differs from the matrix's element by at
// most scales[i] / 2, except for rounding. The largest element of a row is 127 of its scales.
struct QuantizedRows {
  at::Tensor values;  // int8, of the matrix's shape
  at::Tensor scales;  // fp32, one for each row
};
[[nodiscard]] QuantizedRows quantize_rows(const at::Tensor& matrix);
[[nodiscard]] at::Tensor dequantize_rows(const QuantizedRows& rows);

// Returns the layer with buffers for its reference.
[[nodiscard]] std::shared_ptr<const model::Layer> with_reference(
    std::shared_ptr<const model::Layer> layer);
[[nodiscard]] bool has_reference(const model::Layer& layer);

// Copies the current parameters to the reference. Requires a state of a layer that has_reference().
void take_reference(const model::Layer& layer, model::LayerState& state);
// Returns a state to run the layer forward with the earlier parameters. They are dense even if they
// are pruned by now. Requires that a reference was taken.
[[nodiscard]] model::LayerState reference_of(const model::Layer& layer,
                                             const model::LayerState& state);

}  // namespace dynmo::dynamism
