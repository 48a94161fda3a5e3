// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/known_costs.h"

#include <cstdint>
#include <utility>

#include "dynmo/model/memory.h"
#include "dynmo/model/output_shape.h"

namespace dynmo::runtime {

Bytes bytes_of_shape(const std::vector<std::int64_t>& shape, at::ScalarType type) {
  auto bytes = static_cast<std::int64_t>(c10::elementSize(type));
  for (const std::int64_t size : shape) bytes *= size;
  return Bytes{bytes};
}

cost::ModelCost known_costs(const model::Model& model, const PipelineOptions& options,
                            const std::map<LayerId, model::StateShape>& pruned,
                            const cost::ProductFit& fit) {
  const model::OutputShapes shapes =
      model::output_shapes(model, 0, options.boundary_shape, options.boundary_type);
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
    const auto layer_index = static_cast<std::size_t>(costs.size());
    const bool own = !shapes.empty() && !shapes[layer_index].empty();
    known.boundary_bytes =
        bytes_of_shape(own ? shapes[layer_index] : options.boundary_shape, options.boundary_type);
    known.product_time = model::product_time(*layer, shape, fit);
    costs.layers.push_back(std::move(known));
  }
  return costs;
}

}  // namespace dynmo::runtime
