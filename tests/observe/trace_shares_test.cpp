// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/import/trace_shares.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "dynmo/core/rng.h"
#include "dynmo/cost/transformer.h"

namespace dynmo::observe {
namespace {

std::vector<StageTimes> drawn_stages(Rng& rng, std::size_t count) {
  const auto draw = [&] { return 1e-6 * static_cast<double>(1 + rng.below(100000)); };
  std::vector<StageTimes> stages(count);
  for (StageTimes& stage : stages) stage = {draw(), draw(), draw()};
  return stages;
}

cost::ModelCost llama(int blocks) {
  cost::DecoderShape sizes;
  sizes.blocks = blocks;
  sizes.hidden = 256;
  sizes.heads = 4;
  sizes.vocabulary = 4096;
  sizes.sequence = 128;
  const auto shape = cost::transformer_shape(sizes, cost::Architecture::kLlama);
  return cost::transformer_costs(shape, cost::find_device("h100").value()).value();
}

std::string fault_of(const std::vector<StageTimes>& stages, const StageLayers& layers) {
  const auto shared = share_out(stages, layers);
  return shared ? "taken" : shared.error().message;
}

// Expects each stage's layers to take its times. `sizes` are their numbers.
void expect_sums(const cost::ModelCost& model, const std::vector<StageTimes>& stages,
                 const std::vector<int>& sizes, std::uint64_t seed) {
  std::size_t next = 0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    StageTimes sum;
    for (int i = 0; i < sizes[s]; ++i) {
      const cost::LayerCost& layer = model.layers.at(next++);
      EXPECT_GE(layer.forward_s, 0);
      EXPECT_GE(layer.backward_input_s, 0);
      EXPECT_GE(layer.backward_weight_s, 0);
      sum.forward_s += layer.forward_s;
      sum.input_s += layer.backward_input_s;
      sum.weight_s += layer.backward_weight_s;
    }
    EXPECT_NEAR(sum.forward_s, stages[s].forward_s, 1e-12) << "seed " << seed;
    EXPECT_NEAR(sum.input_s, stages[s].input_s, 1e-12) << "seed " << seed;
    EXPECT_NEAR(sum.weight_s, stages[s].weight_s, 1e-12) << "seed " << seed;
  }
  EXPECT_EQ(next, model.layers.size());
}

TEST(TraceShares, AStageTakesWhatItsLayersTake) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    Rng rng(seed);
    const auto stages = drawn_stages(rng, 1 + rng.below(6));
    StageLayers layers;
    int blocks = 0;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      layers.blocks.push_back(static_cast<int>(1 + rng.below(4)));
      blocks += layers.blocks.back();
    }
    std::vector<int> sizes = layers.blocks;
    ++sizes.front();
    ++sizes.back();
    expect_sums(share_out(stages, layers).value().model, stages, sizes, seed);
    layers.formulas = llama(blocks);
    sizes = layers.blocks;
    for (int& size : sizes) size *= 2;
    ++sizes.front();
    ++sizes.back();
    expect_sums(share_out(stages, layers).value().model, stages, sizes, seed);
  }
}

// Stages that run as the formulas say give the formulas back.
TEST(TraceShares, FormulasComeBack) {
  StageLayers layers;
  layers.blocks = {1, 3, 0, 2};
  layers.formulas = llama(6);
  layers.formulas_of = "config.json";
  const auto sum = [&](std::size_t begin, std::size_t end) {
    StageTimes times;
    for (std::size_t i = begin; i < end; ++i) {
      const cost::LayerCost& layer = layers.formulas.layers[i];
      times.forward_s += 2 * layer.forward_s;
      times.input_s += 3 * layer.backward_input_s;
      times.weight_s += 4 * layer.backward_weight_s;
    }
    return times;
  };
  EXPECT_EQ(fault_of({sum(0, 3), sum(3, 9), {}, sum(9, 14)}, layers),
            "--blocks is 1,3,0,2, wanted a layer in each stage");
  layers.blocks = {1, 3, 2, 0};  // the last stage has the head
  const auto shared = share_out({sum(0, 3), sum(3, 9), sum(9, 13), sum(13, 14)}, layers).value();
  EXPECT_EQ(shared.rule,
            "times of 4 stages are shared out over 1, 3, 2, 0 blocks, by the formulas for "
            "config.json, which bytes and updates are from");
  for (std::size_t i = 0; i < 14; ++i) {
    const cost::LayerCost& before = layers.formulas.layers[i];
    const cost::LayerCost& after = shared.model.layers[i];
    EXPECT_NEAR(after.forward_s, 2 * before.forward_s, 1e-15);
    EXPECT_NEAR(after.backward_input_s, 3 * before.backward_input_s, 1e-15);
    EXPECT_NEAR(after.backward_weight_s, 4 * before.backward_weight_s, 1e-15);
    EXPECT_EQ(after.activation_bytes, before.activation_bytes);
    EXPECT_EQ(after.update_s, before.update_s);
  }
}

// Four blocks of 10 each, an embedding of 1 and a head of 7.
TEST(TraceShares, EmbeddingAndHeadHaveWhatIsLeft) {
  const StageLayers layers = {.blocks = {1, 1, 2, 1}, .formulas = {}, .formulas_of = ""};
  const auto model =
      share_out({{11, 10, 11}, {10, 10, 10}, {20, 20, 20}, {17, 17, 9}}, layers).value().model;
  ASSERT_EQ(model.size(), 7);
  EXPECT_EQ(model.layers[0].name, "embedding");
  EXPECT_DOUBLE_EQ(model.layers[0].forward_s, 1);
  EXPECT_DOUBLE_EQ(model.layers[0].backward_input_s, 0);
  EXPECT_EQ(model.layers[4].name, "blocks.3");
  EXPECT_DOUBLE_EQ(model.layers[4].forward_s, 10);
  EXPECT_EQ(model.layers[6].name, "head");
  EXPECT_DOUBLE_EQ(model.layers[6].forward_s, 7);
  EXPECT_DOUBLE_EQ(model.layers[6].backward_weight_s, 0);  // less than a block's in its stage
  EXPECT_DOUBLE_EQ(model.layers[5].backward_weight_s, 9);
}

TEST(TraceShares, FaultsSayWhatToChange) {
  const std::vector<StageTimes> stages(3, StageTimes{1, 1, 1});
  StageLayers layers;
  layers.formulas = llama(6);
  layers.formulas_of = "config.json";
  EXPECT_EQ(fault_of(stages, layers),
            "--model was given without --blocks, wanted the blocks of each of 3 stages, such as "
            "--blocks 4,4,4");
  layers.blocks = {2, 2};
  EXPECT_EQ(fault_of(stages, layers),
            "--blocks is 2,2, wanted one number for each of the 3 stages");
  layers.blocks = {2, 2, 3};
  EXPECT_EQ(fault_of(stages, layers),
            "--blocks is 2,2,3, wanted the 6 blocks of config.json, not 7");
  layers.blocks = {2, 5, -1};
  EXPECT_EQ(fault_of(stages, layers), "--blocks is 2,5,-1, wanted numbers from 0 to 65536");
  layers.formulas = {};
  layers.blocks = {2, 0, 1};
  EXPECT_EQ(fault_of(stages, layers), "--blocks is 2,0,1, wanted at least 1 block a stage");
}

}  // namespace
}  // namespace dynmo::observe
