// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "dynmo/core/allowed.h"
#include "dynmo/dynamism/dense_impl.h"

namespace dynmo::dynamism {

cost::LayerKind DenseModel::kind(int layer) const {
  return work[static_cast<std::size_t>(layer)].kind;
}

cost::LayerCost DenseModel::cost_of(const cost::LayerWork& layer) const {
  return cost::layer_cost(layer, device);
}

Expected<DenseModel> make_dense(std::string_view source, const LoadInputs& inputs) {
  const auto check = [&](std::string_view key, std::int64_t value) -> Expected<void> {
    return check_allowed(key, value, between(1, 1e9, fmt::format("of a run with {}", source)));
  };
  DYNMO_TRY(check("training.steps", inputs.steps));
  DYNMO_TRY(check("training.micro_batches", inputs.micro_batches));
  DenseModel dense;
  DYNMO_ASSIGN(dense.costs, cost::transformer_costs(inputs.shape, inputs.device));
  dense.shape = inputs.shape;
  dense.device = inputs.device;
  dense.work = cost::transformer_work(inputs.shape, inputs.device.bytes_per_element);
  int block = kNoBlock;
  for (const cost::LayerWork& layer : dense.work) {
    if (layer.kind == cost::LayerKind::kAttention) ++block;
    const bool end =
        layer.kind == cost::LayerKind::kEmbedding || layer.kind == cost::LayerKind::kHead;
    dense.block.push_back(end ? kNoBlock : block);
  }
  return dense;
}

}  // namespace dynmo::dynamism
