// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/parallelism.h"

#include <string_view>

namespace dynmo::cost {
namespace {

Expected<void> check_part(std::string_view field, std::int64_t value, std::int64_t most,
                          std::string_view why) {
  if (value >= 1 && value <= most) return {};
  return make_error(ErrorCode::kBadInput, "{} is {}, wanted a whole number from 1 to {}{}", field,
                    value, most, why);
}

// Returns the part of the work on each of `devices`.
LayerWork divided(LayerWork work, double devices) {
  for (double* amount : {&work.matrix_flops, &work.core_flops, &work.moved_bytes, &work.parameters,
                         &work.copied_parameters, &work.product_parameters, &work.activation_bytes,
                         &work.boundary_bytes}) {
    *amount /= devices;
  }
  return work;
}

// Adds the time of collectives. A half block gathers its tokens and scatters the sums, forward and
// backward. The embedding only scatters, and the head only gathers.
void add_collectives(LayerCost& cost, LayerKind kind, double collective_s) {
  if (kind == LayerKind::kEmbedding) {
    cost.forward_s += collective_s;
    cost.backward_weight_s += collective_s;
    return;
  }
  const double count = kind == LayerKind::kHead ? 1 : 2;
  cost.forward_s += count * collective_s;
  cost.backward_input_s += count * collective_s;
}

}  // namespace

Expected<void> validate(const Parallelism& parallelism, const Device& device) {
  DYNMO_TRY(check_part("tensor_parallel", parallelism.tensor, device.devices_per_node,
                       fmt::format(", the devices of a node of {}", device.name)));
  return check_part("optimizer_shards", parallelism.optimizer_shards, kMaxOptimizerShards, "");
}

Expected<ModelCost> parallel_costs(const std::vector<LayerWork>& work, double hidden_bytes,
                                   const Device& device, const Parallelism& parallelism) {
  DYNMO_TRY(validate(parallelism, device));
  const auto devices = static_cast<double>(parallelism.tensor);
  std::vector<LayerWork> parts;
  for (const LayerWork& layer : work) parts.push_back(divided(layer, devices));
  DYNMO_ASSIGN(ModelCost model, layer_costs(parts, device));
  model = at_utilization(std::move(model), device);
  const Link& link = device.inside_node;
  const double collective_s =
      link.latency_s + hidden_bytes * (devices - 1) / devices / link.bandwidth_bytes_per_s;
  for (std::size_t i = 0; i < work.size(); ++i) {
    LayerCost& cost = model.layers[i];
    if (parallelism.tensor > 1) add_collectives(cost, work[i].kind, collective_s);
    cost.update_s /= static_cast<double>(parallelism.optimizer_shards);
    cost.optimizer_bytes = Bytes{(cost.optimizer_bytes.value + parallelism.optimizer_shards - 1) /
                                 parallelism.optimizer_shards};
  }
  return model;
}

}  // namespace dynmo::cost
