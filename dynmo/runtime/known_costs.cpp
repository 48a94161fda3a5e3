// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/known_costs.h"

#include <cstdint>
#include <utility>

#include "dynmo/model/memory.h"

namespace dynmo::runtime {

cost::ModelCost known_costs(const model::Model& model, const PipelineOptions& options,
                            const std::map<LayerId, model::StateShape>& pruned) {
  auto boundary = static_cast<std::int64_t>(c10::elementSize(options.boundary_type));
  for (const std::int64_t size : options.boundary_shape) boundary *= size;
  cost::ModelCost costs;
  for (const auto& layer : model) {
    cost::LayerCost known;
    known.name = layer->name();
    const auto lost = pruned.find(LayerId(costs.size()));
    const model::StateShape shape = lost == pruned.end() ? model::StateShape() : lost->second;
    const model::PrunedBytes sizes = model::pruned_bytes(*layer, shape);
    known.gradient_bytes = sizes.values;
    known.parameter_bytes = sizes.values + sizes.masks + model::buffer_bytes(*layer);
    known.optimizer_bytes = sizes.values * 2;
    known.copy_bytes = model::copy_bytes(*layer) + sizes.patterns;
    known.boundary_bytes = Bytes{boundary};
    known.product_time = model::product_time(*layer, shape);
    costs.layers.push_back(std::move(known));
  }
  return costs;
}

}  // namespace dynmo::runtime
