// SPDX-License-Identifier: Apache-2.0
#pragma once

// A reference is a layer as it was at an earlier step, whose outputs are compared with its present
// ones (plasticity.h): a copy of its parameters in the buffers of its state, so that it moves with
// the layer, is in its checkpoint and part of its digest. A matrix takes int8 and a scale a row, a
// quarter of its bytes; a vector is copied as it is. Egeria's reference model is quantised in the
// same way.

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "dynmo/model/layer.h"

namespace dynmo::dynamism {

// A matrix by rows: values[i][j] * scales[i] is at most scales[i] / 2 from the matrix's element,
// but for rounding. The largest element of a row is 127 of its scales.
struct QuantizedRows {
  at::Tensor values;  // int8, of the matrix's shape
  at::Tensor scales;  // fp32, one a row
};
[[nodiscard]] QuantizedRows quantize_rows(const at::Tensor& matrix);
[[nodiscard]] at::Tensor dequantize_rows(const QuantizedRows& rows);

// The layer with buffers for its reference.
[[nodiscard]] std::shared_ptr<const model::Layer> with_reference(
    std::shared_ptr<const model::Layer> layer);
[[nodiscard]] bool has_reference(const model::Layer& layer);

// Takes the parameters as they are. Requires a state of a layer that has_reference().
void take_reference(const model::Layer& layer, model::LayerState& state);
// A state to run the layer forward with: the parameters as they were, dense where they are pruned
// by now. Requires that a reference was taken.
[[nodiscard]] model::LayerState reference_of(const model::Layer& layer,
                                             const model::LayerState& state);

}  // namespace dynmo::dynamism
