// SPDX-License-Identifier: Apache-2.0
#pragma once

// Boundaries that have another size than the model's hidden tensor, which both ends know: behind a
// slice of a head (Layer::floats_passed), and behind a layer that replays a run, where the size
// follows from the step. Everywhere else what passes between layers has one shape, or has it with
// fewer rows (Needs::drops_rows).

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

// The shapes by layer, in elements of the boundary's type; an empty one is that of the boundary.
// Empty where no layer has another.
using OutputShapes = std::vector<std::vector<std::int64_t>>;
[[nodiscard]] OutputShapes output_shapes(const Model& model, std::int64_t step,
                                         const std::vector<std::int64_t>& boundary_shape,
                                         at::ScalarType boundary_type);

}  // namespace dynmo::model
