// SPDX-License-Identifier: Apache-2.0
#pragma once

// Analytic costs if a rank has several devices, or if replicas divide the optimizer's state.

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/device.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/transformer.h"

namespace dynmo::cost {

inline constexpr std::int64_t kMaxOptimizerShards = 1 << 16;

struct Parallelism {
  // Devices of a rank, all in one node. Each has a part of every matrix (tensor parallelism,
  // Shoeybi et al., arXiv 1909.08053) and of the tokens between them (sequence parallelism,
  // Korthikanti et al., arXiv 2205.05198).
  std::int64_t tensor = 1;
  // Replicas that divide the optimizer's state among them (ZeRO-1, Rajbhandari et al., arXiv
  // 1910.02054).
  std::int64_t optimizer_shards = 1;
};

// Checks a parallelism. Returns kBadInput with the field if `tensor` is not from 1 to the devices
// of a node, or `optimizer_shards` is not from 1 to kMaxOptimizerShards.
[[nodiscard]] Expected<void> validate(const Parallelism& parallelism, const Device& device);

// Returns the costs of layers at the utilization of the device. Bytes are those of one device of
// the rank. `hidden_bytes` are the bytes between two half blocks for one micro-batch, of all
// devices. Returns the errors of layer_costs() and validate().
[[nodiscard]] Expected<ModelCost> parallel_costs(const std::vector<LayerWork>& work,
                                                 double hidden_bytes, const Device& device,
                                                 const Parallelism& parallelism);

}  // namespace dynmo::cost
