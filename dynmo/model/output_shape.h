// SPDX-License-Identifier: Apache-2.0
#pragma once

// Boundaries whose size changes from step to step, and follows from the step alone, so that both
// ends know it: those of layers that replay a run. In all other models what passes between layers
// has one shape, or has it with fewer rows (Needs::drops_rows).

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

// The shapes by layer; an empty one is the model's own. Empty where no layer has another.
using OutputShapes = std::vector<std::vector<std::int64_t>>;
[[nodiscard]] OutputShapes output_shapes(const Model& model, std::int64_t step);

}  // namespace dynmo::model
