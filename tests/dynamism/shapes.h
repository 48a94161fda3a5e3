// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shapes and a device for tests of load models: arithmetic only, so that times are in proportion to
// operations.

#include "dynmo/dynamism/load_inputs.h"
#include "tests/dynamism/default_loads.h"

namespace dynmo::dynamism {

// A memory so fast that moved bytes take no time.
inline cost::Device arithmetic_device() {
  cost::Device device;
  device.name = "arithmetic";
  device.flops_per_s = 1e12;
  device.bandwidth_bytes_per_s = 1e30;
  device.memory = Bytes{std::int64_t{80} << 30};
  return device;
}

inline cost::TransformerShape gpt(int blocks, std::int64_t hidden, std::int64_t sequence) {
  cost::TransformerShape shape = default_shape("none");
  shape.blocks = blocks;
  shape.hidden = hidden;
  shape.heads = shape.kv_heads = hidden / 64;
  shape.intermediate = 4 * hidden;
  shape.sequence = shape.positions = sequence;
  return shape;
}

inline cost::TransformerShape mixture(int blocks, std::int64_t experts, std::int64_t per_token) {
  cost::TransformerShape shape = gpt(blocks, 512, 1024);
  shape.experts = experts;
  shape.experts_per_token = per_token;
  return shape;
}

inline LoadInputs inputs_of(const cost::TransformerShape& shape, std::uint64_t seed = 1,
                            std::int64_t steps = 10'000) {
  return {.shape = shape, .device = arithmetic_device(), .seed = seed, .steps = steps};
}

// The dense model of the same inputs.
inline cost::ModelCost dense(const LoadInputs& inputs) {
  return cost::transformer_costs(inputs.shape, inputs.device).value();
}

// F + I + W of the half blocks of block `block` together.
inline double block_work(const cost::ModelCost& model, int block) {
  const auto work = cost::layer_work_s(model, 1 << 30);
  const auto first = static_cast<std::size_t>(1 + 2 * block);
  return work[first] + work[first + 1];
}

}  // namespace dynmo::dynamism
