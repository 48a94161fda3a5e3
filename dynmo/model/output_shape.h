// SPDX-License-Identifier: Apache-2.0
#pragma once

// Boundaries whose size differs from the model's hidden tensor, as both ends know. One is behind a
// slice of a head (Layer::floats_passed). Another is behind an emulated layer, whose size follows
// from the step. All other boundaries have one shape, or the same with fewer rows
// (Needs::drops_rows).

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "dynmo/model/layer.h"

namespace dynmo::model {

class SizesOutput {
 public:
  virtual ~SizesOutput() = default;
  // Returns the shape of the layer's hidden output. Any thread may call it.
  [[nodiscard]] virtual std::vector<std::int64_t> output_shape(std::int64_t step) const = 0;
};

// The shapes by layer, in elements of the boundary's type. An empty shape is that of the boundary.
// The list is empty if all shapes are.
using OutputShapes = std::vector<std::vector<std::int64_t>>;
[[nodiscard]] OutputShapes output_shapes(const Model& model, std::int64_t step,
                                         const std::vector<std::int64_t>& boundary_shape,
                                         at::ScalarType boundary_type);

}  // namespace dynmo::model
