// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/output_shape.h"

#include <cstddef>

namespace dynmo::model {

OutputShapes output_shapes(const Model& model, std::int64_t step) {
  OutputShapes shapes;
  for (std::size_t i = 0; i < model.size(); ++i) {
    const auto* sizes = dynamic_cast<const SizesOutput*>(model[i].get());
    if (sizes == nullptr) continue;
    shapes.resize(model.size());
    shapes[i] = sizes->output_shape(step);
  }
  return shapes;
}

}  // namespace dynmo::model
