// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/output_shape.h"

#include <cstddef>
#include <utility>

namespace dynmo::model {

OutputShapes output_shapes(const Model& model, std::int64_t step,
                           const std::vector<std::int64_t>& boundary_shape,
                           at::ScalarType boundary_type) {
  OutputShapes shapes;
  const auto set = [&](std::size_t layer, std::vector<std::int64_t> shape) {
    shapes.resize(model.size());
    shapes[layer] = std::move(shape);
  };
  const auto per_float = static_cast<std::int64_t>(sizeof(float) / c10::elementSize(boundary_type));
  for (std::size_t i = 0; i < model.size(); ++i) {
    if (const auto* sizes = dynamic_cast<const SizesOutput*>(model[i].get())) {
      set(i, sizes->output_shape(step));
    } else if (const std::int64_t floats = model[i]->floats_passed(); floats > 0) {
      std::vector<std::int64_t> shape = boundary_shape;
      shape.back() = floats * per_float;
      set(i, std::move(shape));
    }
  }
  return shapes;
}

}  // namespace dynmo::model
