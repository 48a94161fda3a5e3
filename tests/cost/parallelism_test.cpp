// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/parallelism.h"

#include <gtest/gtest.h>

#include <cmath>

namespace dynmo::cost {
namespace {

TransformerShape llama(std::int64_t micro_batch_size = 1) {
  TransformerShape shape;
  shape.blocks = 3;
  shape.hidden = 4096;
  shape.heads = 32;
  shape.kv_heads = 8;
  shape.head_size = 128;
  shape.intermediate = 14336;
  shape.gated_mlp = true;
  shape.vocabulary = 128256;
  shape.sequence = 4096;
  shape.micro_batch_size = micro_batch_size;
  return shape;
}

constexpr double kHidden = 4096.0 * 4096 * 2;

ModelCost costs(const Device& device, const Parallelism& parallelism) {
  auto made = parallel_costs(transformer_work(llama(), device.bytes_per_element), kHidden, device,
                             parallelism);
  EXPECT_TRUE(made) << made.error().message;
  return *std::move(made);
}

// Bytes are rounded for each part.
void expect_part(Bytes part, Bytes whole, std::int64_t parts, const std::string& name) {
  EXPECT_NEAR(static_cast<double>(part.value),
              static_cast<double>(whole.value) / static_cast<double>(parts), 1)
      << name;
}

TEST(Parallelism, OneDeviceHasTheCostsOfTheShape) {
  for (const Device& device : devices()) {
    const auto alone = transformer_costs(llama(), device);
    ASSERT_TRUE(alone);
    const double hidden = 4096.0 * 4096 * device.bytes_per_element;
    const auto made =
        parallel_costs(transformer_work(llama(), device.bytes_per_element), hidden, device, {});
    ASSERT_TRUE(made);
    EXPECT_EQ(*made, at_utilization(*alone, device)) << device.name;
  }
}

// A closed form: each pass takes a T-th, and a half block passes its tokens four times, of which
// each device lacks (T - 1) / T.
TEST(Parallelism, DevicesDivideALayerAndExchangeItsTokens) {
  const Device device = *find_device("h100");
  const ModelCost whole = costs(device, {});
  for (const std::int64_t parts : {2, 4, 8}) {
    const ModelCost model = costs(device, {.tensor = parts});
    const auto t = static_cast<double>(parts);
    const double once = device.inside_node.latency_s +
                        kHidden * (t - 1) / t / device.inside_node.bandwidth_bytes_per_s;
    for (std::size_t i = 0; i < whole.layers.size(); ++i) {
      const LayerCost& one = whole.layers[i];
      const LayerCost& part = model.layers[i];
      const bool embedding = i == 0;
      const bool head = i + 1 == whole.layers.size();
      const double times = embedding || head ? 1 : 2;
      EXPECT_DOUBLE_EQ(part.forward_s, one.forward_s / t + times * once) << one.name;
      EXPECT_DOUBLE_EQ(part.backward_input_s,
                       embedding ? 0 : one.backward_input_s / t + times * once)
          << one.name;
      EXPECT_DOUBLE_EQ(part.backward_weight_s, one.backward_weight_s / t + (embedding ? once : 0))
          << one.name;
      EXPECT_DOUBLE_EQ(part.update_s, one.update_s / t) << one.name;
      expect_part(part.parameter_bytes, one.parameter_bytes, parts, one.name);
      expect_part(part.gradient_bytes, one.gradient_bytes, parts, one.name);
      expect_part(part.optimizer_bytes, one.optimizer_bytes, parts, one.name);
      expect_part(part.activation_bytes, one.activation_bytes, parts, one.name);
      expect_part(part.boundary_bytes, one.boundary_bytes, parts, one.name);
    }
  }
}

TEST(Parallelism, ReplicasDivideTheOptimizerAlone) {
  const Device device = *find_device("a100");
  const ModelCost whole = costs(device, {.tensor = 2});
  const ModelCost model = costs(device, {.tensor = 2, .optimizer_shards = 7});
  for (std::size_t i = 0; i < whole.layers.size(); ++i) {
    LayerCost expected = whole.layers[i];
    expected.update_s /= 7;
    expected.optimizer_bytes = Bytes{(expected.optimizer_bytes.value + 6) / 7};
    EXPECT_EQ(model.layers[i], expected) << expected.name;
  }
}

// A device of a rank holds what Megatron-LM's paper on sequence parallelism says (Korthikanti et
// al., arXiv 2205.05198, table 2): s b h (34 + 5 a s / h) / t for a block with masks.
TEST(Parallelism, StashIsThatOfSequenceParallelism) {
  Device device = *find_device("a100");
  TransformerShape shape;
  shape.blocks = 2;
  shape.hidden = 12288;
  shape.heads = shape.kv_heads = 96;
  shape.head_size = 128;
  shape.intermediate = 4 * shape.hidden;
  shape.vocabulary = 51200;
  shape.sequence = 2048;
  shape.dropout = true;
  shape.fused_attention = false;
  const auto model =
      parallel_costs(transformer_work(shape), 2048.0 * 12288 * 2, device, {.tensor = 8});
  ASSERT_TRUE(model);
  const double sbh = 2048.0 * 12288;
  const double block = sbh * (34 + 5.0 * 96 * 2048 / 12288) / 8;
  const Bytes bytes = model->layers[1].activation_bytes + model->layers[2].activation_bytes;
  EXPECT_NEAR(static_cast<double>(bytes.value), block, 2);
}

TEST(Parallelism, RefusesWhatNoNodeHas) {
  const Device gpu = *find_device("h100");
  const std::vector<LayerWork> work = transformer_work(llama());
  for (const std::int64_t tensor : {0, -1, 9}) {
    const auto refused = parallel_costs(work, kHidden, gpu, {.tensor = tensor});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
    EXPECT_EQ(refused.error().message,
              fmt::format("tensor_parallel is {}, wanted a whole number from 1 to 8, the devices "
                          "of a node of h100",
                          tensor));
  }
  EXPECT_FALSE(parallel_costs(work, kHidden, *find_device("cpu"), {.tensor = 2}));
  const auto shards = parallel_costs(work, kHidden, gpu, {.optimizer_shards = 0});
  ASSERT_FALSE(shards);
  EXPECT_EQ(shards.error().message, "optimizer_shards is 0, wanted a whole number from 1 to 65536");
}

}  // namespace
}  // namespace dynmo::cost
