// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/known_costs.h"

#include <cstdint>
#include <utility>

#include "dynmo/model/memory.h"

namespace dynmo::runtime {

cost::ModelCost known_costs(const model::Model& model, const PipelineOptions& options) {
  auto boundary = static_cast<std::int64_t>(c10::elementSize(options.boundary_type));
  for (const std::int64_t size : options.boundary_shape) boundary *= size;
  cost::ModelCost costs;
  for (const auto& layer : model) {
    cost::LayerCost known;
    known.name = layer->name();
    known.parameter_bytes = known.gradient_bytes = model::parameter_bytes(*layer);
    known.optimizer_bytes = known.parameter_bytes * 2;
    known.copy_bytes = model::copy_bytes(*layer);
    known.boundary_bytes = Bytes{boundary};
    costs.layers.push_back(std::move(known));
  }
  return costs;
}

}  // namespace dynmo::runtime
