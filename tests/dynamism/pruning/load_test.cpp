// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/pruning/load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "dynmo/core/rng.h"
#include "tests/dynamism/shapes.h"

namespace dynmo::dynamism {
namespace {

// Zhu & Gupta 2017, equation 1, for t0 = 3000 and an end point that is included: s_f (1 - (1 -
// x)^3) at x = 0, 1/4, 1/2, 3/4, 1.
TEST(Pruning, FollowsZhuAndGupta) {
  const PruningOptions p;
  const std::vector<std::pair<std::int64_t, double>> table = {
      {0, 0},         {2999, 0},      {3000, 0},      {3999, 0},   {4000, 0.5203},
      {4999, 0.5203}, {5000, 0.7875}, {6000, 0.8859}, {7000, 0.9}, {9999, 0.9}};
  for (const auto& [step, sparsity] : table) {
    EXPECT_NEAR(sparsity_at(p, step), sparsity, 5e-5) << "step " << step;
  }
}

// Output matrices whose initial std is 1 / sqrt(2 L) of the others' (as in GPT-2), L = 24, are what
// one threshold takes first: at 52 % of all weights they are 94 % gone and the others 22 %, at 79 %
// wholly; with the MLP's output alone scaled 98.9 % and 28.6 % at 52 %. Figures of normal draws,
// sorted.
TEST(Pruning, GlobalMagnitudeEmptiesMatricesWithSmallWeights) {
  const double small = 1 / std::sqrt(48.0);
  // In units of h^2: QKV 3 and FC1 4 stay, attention output 1 and FC2 4 are scaled.
  const std::vector<WeightGroup> megatron = {{.weights = 7, .std = 1},
                                             {.weights = 5, .std = small}};
  auto density = global_densities(megatron, 0.5203, 0);
  EXPECT_NEAR(1 - density[0], 0.22, 0.006);
  EXPECT_NEAR(1 - density[1], 0.94, 0.006);
  density = global_densities(megatron, 0.7875, 0);
  EXPECT_GT(1 - density[1], 0.9995);
  const std::vector<WeightGroup> fork = {{.weights = 8, .std = 1}, {.weights = 4, .std = small}};
  density = global_densities(fork, 0.5203, 0);
  EXPECT_NEAR(1 - density[0], 0.286, 0.0015);
  EXPECT_NEAR(1 - density[1], 0.989, 0.0015);
}

// The threshold against sorting drawn weights.
TEST(Pruning, DensitiesAgreeWithSortedWeights) {
  const std::vector<WeightGroup> groups = {{.weights = 20'000, .std = 1},
                                           {.weights = 40'000, .std = 0.5},
                                           {.weights = 10'000, .std = 2}};
  Rng rng(mix_key({0x5047}));
  std::vector<std::pair<double, std::size_t>> weights;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (int i = 0; i < groups[g].weights; ++i) {
      weights.emplace_back(std::abs(rng.normal()) * groups[g].std, g);
    }
  }
  std::sort(weights.rbegin(), weights.rend());
  for (const double sparsity : {0.1, 0.5, 0.9}) {
    const auto density = global_densities(groups, sparsity, 0);
    std::vector<double> kept(groups.size(), 0.0);
    const auto keep =
        static_cast<std::size_t>((1 - sparsity) * static_cast<double>(weights.size()));
    for (std::size_t i = 0; i < keep; ++i) kept[weights[i].second] += 1;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      EXPECT_NEAR(density[g], kept[g] / groups[g].weights, 0.012) << "sparsity " << sparsity;
    }
  }
}

TEST(Pruning, TheThresholdIsExactAndScaleFree) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x5048, seed}));
    std::vector<WeightGroup> groups(1 + rng.below(100));
    double all = 0;
    for (WeightGroup& g : groups) {
      g = {.weights = 1 + 100 * rng.uniform(), .std = std::exp(rng.normal())};
      all += g.weights;
    }
    const double sparsity = 0.98 * rng.uniform();
    const double least = 0.02 * rng.uniform();
    const auto density = global_densities(groups, sparsity, least);
    double left = 0;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      left += groups[i].weights * density[i];
      ASSERT_GE(density[i], least) << "seed " << seed;
      ASSERT_LE(density[i], 1) << "seed " << seed;
    }
    ASSERT_NEAR(left / all, 1 - sparsity, 1e-9) << "seed " << seed;
    for (WeightGroup& g : groups) g.std *= 1e-6;
    const auto scaled = global_densities(groups, sparsity, least);
    for (std::size_t i = 0; i < groups.size(); ++i) ASSERT_NEAR(scaled[i], density[i], 1e-9);
  }
}

// Every matrix alike, and no work but products.
PruningOptions even() {
  PruningOptions p;
  p.depth_ratio = 1;
  p.matrix_spread = 0;
  return p;
}

// bench/results/2026-11-22-sparse-products.md: three products of [1024 x 1024] with 512 tokens by
// ranks of one thread take 1 / 2.19, 1 / 3.37 and 1 / 5.12 of dense time at 80, 90 and 95 %, and
// more than dense at 50 %, where the matrix stays dense.
TEST(Pruning, SparseProductsReachTheMeasuredGains) {
  const LoadInputs inputs = inputs_of(gpt(2, 1024, 512));
  const double all = dense(inputs).layers[2].forward_s;  // an MLP: products only
  const std::vector<std::pair<double, double>> measured = {
      {0.5, 1}, {0.8, 2.19}, {0.9, 3.37}, {0.95, 5.12}};
  for (const auto& [sparsity, gain] : measured) {
    PruningOptions p = even();
    p.final_sparsity = sparsity;
    const double now = (*make_pruning(p, inputs))->at(7000).layers[2].forward_s;
    EXPECT_NEAR(all / now, gain, 0.12 * gain) << "sparsity " << sparsity;
  }
}

// The rule that a training predicts by, with the shares of weights that are spread evenly.
TEST(Pruning, ProductsTakeWhatTheFitSaysOfEvenWeights) {
  const LoadInputs inputs = inputs_of(gpt(2, 1024, 512));
  PruningOptions p = even();
  p.final_sparsity = 0.98;
  p.product_fit = {.fixed = 0.1, .weights = 1.5, .segments = 0.4};
  // 1 - 0.98^128 of the segments have a weight.
  const double expected = 0.1 + 1.5 * 0.02 + 0.4 * (1 - std::pow(0.98, 128));
  const auto load = make_pruning(p, inputs);
  EXPECT_NEAR((*load)->at(7000).layers[2].product_time, expected, 1e-9);
  EXPECT_EQ((*load)->at(0).layers[2].product_time, 1);
}

TEST(Pruning, MemoryFollowsWhatIsLeft) {
  const LoadInputs inputs = inputs_of(gpt(2, 1024, 512));
  const auto all = dense(inputs).layers[2];
  const auto now = (*make_pruning(even(), inputs))->at(8000).layers[2];
  const double weights = 8.0 * 1024 * 1024;
  const double kept = 0.1 * weights;
  const double others = static_cast<double>(all.parameter_bytes.value) - 2 * weights;
  EXPECT_NEAR(static_cast<double>(now.parameter_bytes.value), kept * (2 + 4) + others, 16);
  EXPECT_NEAR(static_cast<double>((all.optimizer_bytes - now.optimizer_bytes).value),
              12 * (weights - kept), 64);
  EXPECT_EQ(now.activation_bytes, all.activation_bytes);
}

TEST(Pruning, ChangesAtPruningStepsOnly) {
  const LoadInputs inputs = inputs_of(gpt(4, 512, 512));
  const auto load = make_pruning({}, inputs);
  for (std::int64_t step = 0; step < 9000; step += step % 1000 < 999 ? 37 : 1) {
    EXPECT_FALSE(((*load)->announced_at(step) != cost::Announced::kNothing) && step % 1000 != 0)
        << step;
  }
  for (const std::int64_t step : {4000, 5000, 6000, 7000}) {
    EXPECT_TRUE(((*load)->announced_at(step) != cost::Announced::kNothing)) << step;
    EXPECT_FALSE(((*load)->announced_at(step + 1) != cost::Announced::kNothing)) << step;
    EXPECT_EQ((*load)->at(step), (*load)->at(step + 999));
  }
  EXPECT_FALSE(((*load)->announced_at(3000) != cost::Announced::kNothing));  // s_i is 0
  EXPECT_FALSE(((*load)->announced_at(8000) != cost::Announced::kNothing));
  EXPECT_EQ((*load)->at(3999), dense(inputs));
}

// More is pruned, less is done, of every layer; embedding and head stay.
TEST(Pruning, WorkAndMemoryNeverGrow) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const LoadInputs inputs = inputs_of(gpt(12, 512, 512), seed);
    const auto load = make_pruning({}, inputs);
    auto before = (*load)->at(0);
    for (const std::int64_t step : {3000, 4000, 5000, 6000, 7000}) {
      const auto now = (*load)->at(step);
      for (std::size_t i = 0; i < now.layers.size(); ++i) {
        ASSERT_LE(now.layers[i].forward_s, before.layers[i].forward_s) << "seed " << seed;
        ASSERT_LE(now.layers[i].optimizer_bytes, before.layers[i].optimizer_bytes);
      }
      EXPECT_EQ(now.layers.front(), before.layers.front());
      EXPECT_EQ(now.layers.back(), before.layers.back());
      before = now;
    }
  }
}

// The defaults are chosen so that densities are 1.5 to 4 apart at 80 to 90 %; nothing was measured.
TEST(Pruning, DefaultsSpreadTheDensities) {
  std::vector<WeightGroup> blocks(32);
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    blocks[b] = {.weights = 1,
                 .std = std::pow(PruningOptions{}.depth_ratio, static_cast<double>(b) / 31)};
  }
  for (const double sparsity : {0.8, 0.9}) {
    const auto density = global_densities(blocks, sparsity, 0.02);
    EXPECT_GT(density.back() / density.front(), 1.5);
    EXPECT_LT(density.back() / density.front(), 4);
  }
}

TEST(Pruning, FaultsNameTheField) {
  const LoadInputs inputs = inputs_of(gpt(1, 512, 512));
  PruningOptions p;
  p.end = 7500;
  EXPECT_EQ(
      make_pruning(p, inputs).error().message,
      "pruning.end is 7500, wanted a whole number of pruning.every (1000) behind pruning.start, "
      "3000");
  p = {};
  p.final_sparsity = 0.99;
  EXPECT_NE(make_pruning(p, inputs).error().message.find("max_sparsity"), std::string::npos);
  p = {};
  p.product_fit.weights = 0;
  EXPECT_NE(make_pruning(p, inputs).error().message.find("product_weights"), std::string::npos);
}

// The threshold against sorting drawn sizes.
TEST(Pruning, DensitiesOfUnitsAgreeWithSortedSizes) {
  const std::vector<WeightGroup> groups = {{.weights = 20'000, .std = 1},
                                           {.weights = 20'000, .std = 1.1},
                                           {.weights = 20'000, .std = 0.9}};
  constexpr double kSpread = 0.1;
  Rng rng(mix_key({0x5048}));
  std::vector<std::pair<double, std::size_t>> sizes;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (int i = 0; i < groups[g].weights; ++i) {
      sizes.emplace_back(groups[g].std * (1 + kSpread * rng.normal()), g);
    }
  }
  std::sort(sizes.rbegin(), sizes.rend());
  for (const double sparsity : {0.1, 0.5, 0.8}) {
    std::vector<double> left(groups.size());
    for (std::size_t i = 0; i < static_cast<std::size_t>((1 - sparsity) * 60'000); ++i) {
      left[sizes[i].second] += 1;
    }
    const std::vector<double> densities = unit_densities(groups, sparsity, 1e-3, kSpread);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      EXPECT_NEAR(densities[g], left[g] / groups[g].weights, 0.012) << g << " at " << sparsity;
    }
  }
  // The sparsity is lowered if each group keeps its least.
  for (const double density : unit_densities(groups, 0.9, 0.25, kSpread)) {
    EXPECT_DOUBLE_EQ(density, 0.25);
  }
}

// Each layer costs the same as a dense one with the remaining hidden units and heads.
TEST(Pruning, LayersWithFewerUnitsCostWhatSmallerOnesDo) {
  PruningOptions options{.start = 1, .end = 1, .every = 1, .final_sparsity = 0.5};
  options.form = PruningForm::kUnits;
  options.depth_ratio = 1;
  options.matrix_spread = 0;
  LoadInputs inputs{.shape = cost::transformer_shape({.vocabulary = 1000,
                                                      .hidden = 256,
                                                      .blocks = 4,
                                                      .heads = 16,
                                                      .kv_heads = 8,
                                                      .intermediate = 512,
                                                      .sequence = 64},
                                                     cost::Architecture::kLlama),
                    .device = arithmetic_device(),
                    .steps = 10,
                    .micro_batches = 4};
  const auto load = make_pruning(options, inputs);
  ASSERT_TRUE(load.has_value()) << load.error().message;
  cost::TransformerShape smaller = inputs.shape;
  smaller.heads = 8;
  smaller.kv_heads = 4;
  smaller.intermediate = 256;
  const auto expected = cost::transformer_costs(smaller, inputs.device);
  ASSERT_TRUE(expected.has_value()) << expected.error().message;
  const cost::ModelCost dense = (*load)->at(0);
  const cost::ModelCost pruned = (*load)->at(1);
  for (std::size_t i = 0; i < pruned.layers.size(); ++i) {
    const cost::LayerCost& layer = pruned.layers[i];
    const cost::LayerCost& wanted = expected->layers[i];
    EXPECT_DOUBLE_EQ(layer.forward_s, wanted.forward_s) << i;
    EXPECT_DOUBLE_EQ(layer.backward_input_s, wanted.backward_input_s) << i;
    EXPECT_DOUBLE_EQ(layer.update_s, wanted.update_s) << i;
    EXPECT_EQ(layer.activation_bytes, wanted.activation_bytes) << i;
    EXPECT_EQ(layer.parameter_bytes, wanted.parameter_bytes) << i;
    const bool block = i > 0 && i + 1 < pruned.layers.size();
    EXPECT_DOUBLE_EQ(layer.product_time, block ? 0.5 : 1) << i;
    EXPECT_EQ(layer.forward_s < dense.layers[i].forward_s, block) << i;
  }
}

}  // namespace
}  // namespace dynmo::dynamism
