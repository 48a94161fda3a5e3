// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/dense_impl.h"
#include "dynmo/dynamism/ranges_impl.h"

namespace dynmo::dynamism {

cost::LayerKind DenseModel::kind(int layer) const {
  return work[static_cast<std::size_t>(layer)].kind;
}

cost::LayerCost DenseModel::cost_of(const cost::LayerWork& layer) const {
  return cost::layer_cost(layer, device);
}

Expected<DenseModel> make_dense(std::string_view source, const LoadInputs& inputs) {
  DYNMO_TRY(check_ranges(source, {{"steps", static_cast<double>(inputs.steps), 1, 1e9}}));
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
