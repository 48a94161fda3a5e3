// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/blocks.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>

#include "dynmo/core/rng.h"

namespace dynmo::cost {
namespace {

LayerCost part_called(std::string name, double seconds, bool frozen = false) {
  LayerCost layer;
  layer.name = std::move(name);
  layer.forward_s = seconds;
  layer.backward_input_s = 2 * seconds;
  layer.backward_weight_s = 3 * seconds;
  layer.update_s = 4 * seconds;
  layer.parameter_bytes = layer.gradient_bytes = layer.optimizer_bytes = Bytes{100};
  layer.copy_bytes = Bytes{7};
  layer.activation_bytes = Bytes{10};
  layer.boundary_bytes = Bytes{static_cast<std::int64_t>(seconds)};
  layer.frozen = frozen;
  return layer;
}

ModelCost halves_of(int blocks, int slices) {
  ModelCost model;
  model.layers.push_back(part_called("embedding", 1));
  for (int block = 0; block < blocks; ++block) {
    model.layers.push_back(part_called(fmt::format("blocks.{}.attention", block), 10 + block));
    model.layers.push_back(part_called(fmt::format("blocks.{}.mlp", block), 20 + block));
  }
  for (int slice = 0; slice < slices; ++slice) {
    model.layers.push_back(
        part_called(slices == 1 ? "head" : fmt::format("head.{} of {}", slice, slices), 5));
  }
  return model;
}

TEST(Blocks, AreTheSumsOfTheirHalves) {
  const ModelCost whole = joined_blocks(halves_of(12, 4));
  ASSERT_EQ(whole.size(), 14);
  EXPECT_EQ(whole.layers[0], part_called("embedding", 1));
  const LayerCost& third = whole.layers[3];
  EXPECT_EQ(third.name, "blocks.2");
  EXPECT_EQ(third.forward_s, 12 + 22);
  EXPECT_EQ(third.backward_input_s, 2 * 34);
  EXPECT_EQ(third.backward_weight_s, 3 * 34);
  EXPECT_EQ(third.update_s, 4 * 34);
  EXPECT_EQ(third.parameter_bytes, Bytes{200});
  EXPECT_EQ(third.copy_bytes, Bytes{14});
  EXPECT_EQ(third.activation_bytes, Bytes{20});
  EXPECT_EQ(third.boundary_bytes, Bytes{22}) << "what its last half sends";
  EXPECT_EQ(whole.layers.back().name, "head");
  EXPECT_EQ(whole.layers.back().forward_s, 20);
}

TEST(Blocks, KeepSlicesOfTheHeadApartIfAsked) {
  const ModelCost halves = halves_of(2, 4);
  EXPECT_EQ(head_slices(halves), 4);
  EXPECT_EQ(head_slices(halves_of(2, 1)), 1);
  const ModelCost apart = joined_blocks(halves, HeadSlices::kApart);
  ASSERT_EQ(apart.size(), 1 + 2 + 4);
  EXPECT_EQ(apart.layers.back(), halves.layers.back());
  EXPECT_EQ(joined_blocks(apart), joined_blocks(halves));
}

TEST(Blocks, OfOnePartAreWholeAndOtherNamesStay) {
  ModelCost model;
  for (const char* name : {"embedding", "blocks.0.mamba", "blocks.1.attention", "blocks.10.mlp",
                           "norm", "layers.3.x", "head"}) {
    model.layers.push_back(part_called(name, 1));
  }
  std::vector<std::string> names;
  for (const LayerCost& layer : joined_blocks(model).layers) names.push_back(layer.name);
  EXPECT_EQ(names, (std::vector<std::string>{"embedding", "blocks.0", "blocks.1", "blocks.10",
                                             "norm", "layers.3.x", "head"}));
}

// The work of a model is that of its blocks, whatever is frozen: what does not run of a half does
// not run of its block.
TEST(Blocks, HaveTheWorkAndTheStateOfTheirHalves) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0xB10C, seed}));
    ModelCost halves = halves_of(5, 1 + static_cast<int>(rng.below(3)));
    const auto prefix = rng.below(halves.layers.size() + 1);
    for (std::size_t i = 0; i < halves.layers.size(); ++i) {
      halves.layers[i].frozen = i < prefix || rng.below(4) == 0;
    }
    const ModelCost whole = joined_blocks(halves);
    const auto sum = [](const ModelCost& model) {
      const std::vector<double> work = layer_work_s(model, 4);
      return std::accumulate(work.begin(), work.end(), 0.0);
    };
    EXPECT_NEAR(sum(whole), sum(halves), 1e-9) << seed;
    Bytes states;
    for (const LayerCost& layer : halves.layers) states += state_bytes(layer);
    for (const LayerCost& layer : whole.layers) states -= state_bytes(layer);
    EXPECT_EQ(states, Bytes{0}) << seed;
  }
}

TEST(Blocks, KeepThePrunedShareOfTheirWork) {
  ModelCost model = halves_of(1, 1);
  model.layers[1].product_time = 0.5;  // 10 of 20 s before pruning
  const ModelCost whole = joined_blocks(model);
  EXPECT_DOUBLE_EQ(whole.layers[1].product_time, (10.0 + 20.0) / (20.0 + 20.0));
  EXPECT_TRUE(validate(whole));
}

}  // namespace
}  // namespace dynmo::cost
