// SPDX-License-Identifier: Apache-2.0
// Mixture of experts in trainings: that a bias evens counts out, and what a run says of them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "dynmo/dynamism/moe/load.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/moe.h"
#include "tests/model/helpers.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

using dynamism::MoeOptions;
using dynamism::MoeRouter;

dynamism::MakeSources experts_by(const MoeOptions& options) {
  return [options](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_moe_source(options));
    return sources;
  };
}

RunOptions run_with(const MoeOptions& options) {
  model::LlamaConfig config = small_model();
  config.dropout = 0;
  RunOptions run{.cut = {3, 5}, .make_sources = experts_by(options)};
  model::Recipe recipe = model::decoder_recipe(model::make_llama(config));
  EXPECT_TRUE(dynamism::shape(run.make_sources(1), recipe));
  run.layers = model::layers_of(std::move(recipe));
  return run;
}

// Tokens that have much in common, which a router likes or not.
Begin skewed(const model::Model& layers, const plan::Plan& plan, Rank rank, std::uint64_t seed) {
  Begin begin{.states = initial_states(layers, plan, rank, seed)};
  for (auto& [id, state] : begin.states) {
    for (model::Parameter& p : state.parameters) {
      if (p.name == "embed_tokens.weight") p.value.add_(0.02);
      if (p.name != "block_sparse_moe.gate.weight") continue;
      for (std::int64_t e = 0; e < p.value.size(0); ++e) {
        p.value[e].mul_(10).add_(0.004 * static_cast<double>((5 * e + id.value) % p.value.size(0)));
      }
    }
  }
  return begin;
}

// Largest MaxVio of a block, of the counts of many steps together: those of one step vary by more
// than a bias can even out.
struct Evened {
  double first = 0;  // 10 steps
  double last = 0;   // 20 steps
};

double largest_violation(const std::vector<std::vector<double>>& counts) {
  double largest = 0;
  for (const auto& block : counts) {
    const double sum = std::accumulate(block.begin(), block.end(), 0.0);
    const double most = *std::ranges::max_element(block);
    largest = std::max(largest, most / sum * static_cast<double>(block.size()) - 1);
  }
  return largest;
}

void add_counts(std::vector<std::vector<double>>& sums,
                const std::vector<std::vector<double>>& counts) {
  sums.resize(counts.size());
  for (std::size_t b = 0; b < counts.size(); ++b) {
    sums[b].resize(counts[b].size());
    for (std::size_t e = 0; e < counts[b].size(); ++e) sums[b][e] += counts[b][e];
  }
}

Evened evened_out(const MoeOptions& options, int steps) {
  RunOptions run = run_with(options);
  run.steps = steps;
  run.learning_rate = 3e-4;
  run.begin = [&](const model::Model& layers, const plan::Plan& plan,
                  Rank rank) -> Expected<Begin> { return skewed(layers, plan, rank, 7); };
  std::vector<std::vector<double>> first;
  std::vector<std::vector<double>> last;
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (pipeline.grid().world().rank().value != 0 || step == 0) return {};
    const Json figures = dynamism::figures(pipeline.sources());
    const auto counts = figures["moe"]["counts"].get<std::vector<std::vector<double>>>();
    if (step <= 10) add_counts(first, counts);
    if (step >= steps - 20) add_counts(last, counts);
    return {};
  };
  const RunResult done = run_pipeline(run);
  EXPECT_TRUE(done.status) << done.status.error().message;
  return {.first = largest_violation(first), .last = largest_violation(last)};
}

TEST(MoeTraining, ABiasEvensTheCountsOutWithoutAnAuxiliaryLoss) {
  MoeOptions options;
  options.router = MoeRouter::kBias;
  const Evened bias = evened_out(options, 300);
  EXPECT_GE(bias.first, 1);
  EXPECT_LE(bias.last, 0.3);
  options.bias_rate = 0;
  const Evened alone = evened_out(options, 300);
  EXPECT_GE(alone.first, 1);
  EXPECT_GT(alone.last, 2 * bias.last) << "what training alone comes to";
}

TEST(MoeTraining, ABiasStaysWhereItsLayerIsFrozen) {
  MoeOptions options;
  options.router = MoeRouter::kBias;
  options.experts = 4;
  RunOptions run = run_with(options);
  run.make_sources = [options](std::int64_t steps) {
    dynamism::Sources sources = experts_by(options)(steps);
    sources.push_back(dynamism::make_freezing_source({.schedule = freezing()}, steps));
    return sources;
  };
  run.cut = {kLayers};
  std::map<int, at::Tensor> frozen;
  std::map<int, at::Tensor> last;
  int moved = 0;
  run.before_step = [&](Pipeline& pipeline, std::int64_t) -> Expected<void> {
    for (const auto& [id, state] : pipeline.states()) {
      if (state.buffers.empty()) continue;
      const at::Tensor& bias = state.buffers.front().value;
      if (state.frozen) {
        const auto [found, fresh] = frozen.try_emplace(id.value, bias.clone());
        EXPECT_TRUE(at::equal(found->second, bias)) << "layer " << id.value;
      } else if (last.contains(id.value) && !at::equal(last[id.value], bias)) {
        ++moved;
      }
      last[id.value] = bias.clone();
    }
    return {};
  };
  const RunResult done = run_pipeline(run);
  ASSERT_TRUE(done.status) << done.status.error().message;
  EXPECT_GE(frozen.size(), 1U);
  EXPECT_GT(moved, 10);
}

TEST(MoeTraining, SaysWhatExpertsWereGiven) {
  MoeOptions options;
  options.experts = 6;
  options.capacity_factor = 0.8;
  RunOptions run = run_with(options);
  run.steps = 3;
  run.replicas = 2;
  int seen = 0;
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step == 0 || pipeline.grid().world().rank().value != 0) return {};
    const Json moe = dynamism::figures(pipeline.sources())["moe"];
    for (std::size_t block = 0; block < 3; ++block) {
      const auto counts = moe["counts"][block].get<std::vector<double>>();
      const double sum = std::accumulate(counts.begin(), counts.end(), 0.0);
      // 2 replicas, 4 micro-batches, 2 sequences of 12 tokens, 2 experts a token.
      EXPECT_EQ(sum, 2 * 4 * 2 * 12 * 2);
      EXPECT_GE(moe["dropped"][block].get<double>(), 0.15 * sum);
      const double largest = *std::ranges::max_element(counts);
      EXPECT_NEAR(moe["max_violation"][block].get<double>(), largest / sum * 6 - 1, 1e-12);
      EXPECT_GT(moe["entropy"][block].get<double>(), 0.5);
      EXPECT_LE(moe["entropy"][block].get<double>(), std::log(6) + 1e-6);
      EXPECT_GT(moe["aux_loss"][block].get<double>(), 0.009);
      EXPECT_EQ(moe["z_loss"][block].get<double>(), 0);
      for (const int ranks : {2, 3, 6}) {
        EXPECT_NEAR(moe["straggler_factor"][std::to_string(ranks)][block].get<double>(),
                    dynamism::straggler_factor(counts, ranks, 1e18), 1e-12);
      }
      ++seen;
    }
    EXPECT_FALSE(moe["straggler_factor"].contains("4"));
    EXPECT_NE(dynamism::progress(pipeline.sources()).find("dropped"), std::string::npos);
    return {};
  };
  const RunResult done = run_pipeline(run);
  ASSERT_TRUE(done.status) << done.status.error().message;
  EXPECT_EQ(seen, 6);
}

// The load model takes the counts of whole steps (moe.counts); devices would wait in every
// micro-batch.
TEST(MoeLoad, OfAStepsCountsIsTheMeanOfItsMicroBatches) {
  model::LlamaConfig config = small_model();
  config.shape.sequence = 512;
  for (const MoeRouter router : {MoeRouter::kTopK, MoeRouter::kSinkhorn}) {
    MoeOptions options;
    options.router = router;
    model::Recipe recipe = model::decoder_recipe(model::make_llama(config));
    ASSERT_TRUE(dynamism::make_moe_source(options)->shape(recipe));
    const auto& layer = *recipe.slots[2].layer;
    const model::LayerState state = model::make_state(layer, LayerId(2), 4);
    const at::Tensor common = model::testing::random_tensor({32}, 1, at::kFloat);
    std::vector<double> sum(8);
    std::map<int, double> mean;
    constexpr int kMicroBatches = 8;
    for (std::uint64_t m = 0; m < kMicroBatches; ++m) {
      const at::Tensor x = model::testing::random_tensor({2, 512, 32}, 10 + m, at::kFloat);
      const auto figures = layer.forward(state, x + common, {}, nullptr).figures;
      const std::vector<double> counts(figures.begin() + model::kMoeCounts, figures.end());
      for (std::size_t e = 0; e < counts.size(); ++e) sum[e] += counts[e];
      for (const int ranks : {2, 4, 8}) {
        mean[ranks] += dynamism::straggler_factor(counts, ranks, 1e18) / kMicroBatches;
      }
    }
    for (const auto& [ranks, factor] : mean) {
      EXPECT_NEAR(dynamism::straggler_factor(sum, ranks, 1e18), factor, 0.1 * factor)
          << ranks << " devices";
    }
  }
}

TEST(MoeSource, RefusesAModelWithoutAnMlpThatTakesExperts) {
  for (const bool empty : {false, true}) {
    model::Recipe recipe;
    if (!empty) {
      recipe = model::decoder_recipe(model::make_gpt2(model::testing::tiny_gpt2()));
    }
    const auto refused = dynamism::make_moe_source({})->shape(recipe);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
    EXPECT_NE(refused.error().message.find("moe.enabled"), std::string::npos);
    EXPECT_NE(refused.error().message.find("model.family"), std::string::npos);
  }
}

}  // namespace
}  // namespace dynmo::runtime::testing
