// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/registry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/freezing/options.h"
#include "dynmo/dynamism/mixture_of_depths/options.h"
#include "dynmo/dynamism/moe/options.h"
#include "dynmo/dynamism/pruning/options.h"
#include "dynmo/dynamism/sparse_attention/options.h"
#include "tests/dynamism/shapes.h"

namespace dynmo::dynamism {
namespace {

LoadOptions options_of(std::string_view source, std::uint64_t seed) {
  LoadOptions options;
  options.inputs = {.shape = default_shape(source), .device = arithmetic_device(), .seed = seed};
  options.inputs.shape.blocks = 10;
  // Which random numbers decide, unlike by the schedule.
  options.sources.get<FreezingOptions>().rule = FreezingRule::kPlasticity;
  return options;
}

// Costs are a function of (parameters, seed, step): two models asked in different orders agree, and
// every step is a valid model of the same layers.
TEST(Sources, AnyStepAtAnyTimeIsTheSame) {
  for (const std::string& source : load_names()) {
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      const auto one = make_load_model(source, options_of(source, seed));
      const auto two = make_load_model(source, options_of(source, seed));
      ASSERT_TRUE(one && two) << source;
      const cost::ModelCost first = (*one)->at(0);
      std::vector<std::int64_t> steps;
      Rng rng(mix_key({0x50CE, seed}));
      for (int i = 0; i < 30; ++i) steps.push_back(static_cast<std::int64_t>(rng.below(12'000)));
      std::vector<cost::ModelCost> forwards;
      for (const std::int64_t step : steps) forwards.push_back((*one)->at(step));
      for (std::size_t i = steps.size(); i-- > 0;) {
        const cost::ModelCost again = (*two)->at(steps[i]);
        ASSERT_EQ(again, forwards[i]) << source << ", seed " << seed << ", step " << steps[i];
        ASSERT_TRUE(cost::validate(again)) << source << ", seed " << seed;
        ASSERT_EQ(again.size(), first.size());
        for (std::size_t l = 0; l < again.layers.size(); ++l) {
          ASSERT_EQ(again.layers[l].name, first.layers[l].name);
        }
      }
    }
  }
}

// A source changes the blocks alone: with the head in slices they cost what they cost before, and
// the slices what they cost in the dense model.
TEST(Sources, KnowAHeadInSlices) {
  for (const std::string& source : load_names()) {
    LoadOptions options = options_of(source, 3);
    options.sources.get<MixtureOfDepthsOptions>().noise = 0;
    const auto whole = make_load_model(source, options);
    options.inputs.shape.head_slices = 5;
    const auto sliced = make_load_model(source, options);
    if (source == "early_exit" || source == "early-exit") continue;  // early_exit/load_test.cpp
    ASSERT_TRUE(whole && sliced) << source;
    const cost::ModelCost dense =
        cost::transformer_costs(options.inputs.shape, arithmetic_device()).value();
    for (const std::int64_t step : {0, 700, 4000, 9999}) {
      const cost::ModelCost one = (*whole)->at(step);
      const cost::ModelCost five = (*sliced)->at(step);
      ASSERT_EQ(five.size(), one.size() + 4) << source;
      for (std::size_t l = 0; l + 1 < one.layers.size(); ++l) {
        ASSERT_EQ(five.layers[l], one.layers[l]) << source << ", step " << step;
      }
      for (std::size_t l = one.layers.size() - 1; l < five.layers.size(); ++l) {
        ASSERT_EQ(five.layers[l], dense.layers[l]) << source << ", step " << step;
      }
    }
  }
}

TEST(Sources, SeedsDiffer) {
  for (const std::string& source : load_names()) {
    const auto one = make_load_model(source, options_of(source, 1));
    const auto two = make_load_model(source, options_of(source, 2));
    bool same = true;
    for (std::int64_t step = 1000; step < 9000; step += 100) {
      same = same && (*one)->at(step) == (*two)->at(step);
    }
    EXPECT_EQ(same, source == "none") << source;
  }
}

// A device twice as fast halves every time and moves no byte, so that the load is no matter of
// units.
TEST(Sources, TimesScaleWithTheDevice) {
  for (const std::string& source : load_names()) {
    LoadOptions options = options_of(source, 3);
    const auto slow = make_load_model(source, options);
    options.inputs.device.flops_per_s *= 2;
    options.inputs.device.bandwidth_bytes_per_s *= 2;
    const auto fast = make_load_model(source, options);
    const auto a = (*slow)->at(7777);
    const auto b = (*fast)->at(7777);
    for (std::size_t i = 0; i < a.layers.size(); ++i) {
      EXPECT_DOUBLE_EQ(a.layers[i].forward_s, 2 * b.layers[i].forward_s) << source;
      EXPECT_DOUBLE_EQ(a.layers[i].backward_input_s, 2 * b.layers[i].backward_input_s) << source;
      EXPECT_EQ(a.layers[i].activation_bytes, b.layers[i].activation_bytes) << source;
    }
  }
}

// Nothing but MoE's stragglers makes a layer more expensive than the dense one; an exit has a head
// to run.
TEST(Sources, DynamismRemovesWork) {
  for (const std::string& source : load_names()) {
    if (source == "moe" || source == "none") continue;
    const LoadOptions options = options_of(source, 5);
    const auto load = make_load_model(source, options);
    const auto all = cost::layer_work_s(dense(options.inputs), 1 << 30);
    const auto now = cost::layer_work_s((*load)->at(9000), 1 << 30);
    double dense_sum = 0;
    double sum = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      dense_sum += all[i];
      sum += now[i];
    }
    EXPECT_LT(sum, 0.99 * dense_sum) << source;
  }
}

LoadInputs random_inputs(Rng& rng) {
  const auto pick = [&](std::int64_t least, std::int64_t most) {
    return least +
           static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(most - least + 1)));
  };
  cost::TransformerShape shape;
  shape.blocks = static_cast<int>(pick(1, 9));
  shape.kv_heads = pick(1, 4);
  shape.heads = shape.kv_heads * pick(1, 4);
  shape.head_size = pick(1, 128);
  shape.hidden = pick(1, 1024);
  shape.intermediate = pick(1, 4096);
  shape.gated_mlp = rng.below(2) == 0;
  shape.tied_embedding = rng.below(2) == 0;
  shape.vocabulary = pick(1, 60'000);
  shape.experts = rng.below(3) == 0 ? 0 : 8;
  shape.experts_per_token = std::min<std::int64_t>(shape.experts, pick(1, 8));
  shape.sequence = pick(1, 4096);
  shape.micro_batch_size = pick(1, 4);
  return {.shape = shape,
          .device = cost::devices()[rng.below(cost::devices().size())],
          .seed = rng.next(),
          .steps = pick(1, 20'000)};
}

// Any share from below 0 to above 1, so that some are refused.
double random_share(Rng& rng) { return std::clamp(1.4 * rng.uniform() - 0.1, -0.05, 1.05); }

LoadOptions random_options(Rng& rng) {
  LoadOptions o;
  o.inputs = random_inputs(rng);
  auto& moe = o.sources.get<MoeOptions>();
  auto& pruning = o.sources.get<PruningOptions>();
  auto& freezing = o.sources.get<FreezingOptions>();
  auto& sparse_attention = o.sources.get<SparseAttentionOptions>();
  auto& early_exit = o.sources.get<EarlyExitOptions>();
  auto& mixture_of_depths = o.sources.get<MixtureOfDepthsOptions>();
  moe.expert_ranks = 1 << rng.below(5);
  moe.max_skew = 5 * random_share(rng);
  moe.drift = 2 * random_share(rng);
  moe.capacity_factor = rng.below(2) == 0 ? 0 : 2 * random_share(rng);
  pruning.start = static_cast<std::int64_t>(rng.below(100));
  pruning.every = static_cast<std::int64_t>(1 + rng.below(100));
  pruning.end = pruning.start + pruning.every * static_cast<std::int64_t>(rng.below(20));
  pruning.final_sparsity = random_share(rng);
  pruning.product_fit = {
      .fixed = random_share(rng), .weights = 3 * random_share(rng), .segments = random_share(rng)};
  pruning.depth_ratio = std::exp(3 * rng.normal());
  pruning.form = static_cast<PruningForm>(rng.below(2));
  freezing.rule = static_cast<FreezingRule>(rng.below(4));
  freezing.check_every = static_cast<std::int64_t>(1 + rng.below(500));
  freezing.tolerance = random_share(rng);
  freezing.max_fraction = random_share(rng);
  sparse_attention.buckets = static_cast<int>(2 + 2 * rng.below(32));
  sparse_attention.max_skew = random_share(rng);
  sparse_attention.drift = random_share(rng);
  early_exit.survivors = random_share(rng);
  early_exit.exit_every = static_cast<std::int64_t>(1 + rng.below(6));
  early_exit.exited = static_cast<ExitedTokens>(rng.below(2));
  early_exit.exit_spread = 3 * random_share(rng);
  mixture_of_depths.capacity = random_share(rng);
  mixture_of_depths.every = static_cast<std::int64_t>(1 + rng.below(4));
  return o;
}

TEST(Sources, RandomParametersGiveValidCostsOrAnError) {
  int made = 0;
  for (std::uint64_t seed = 0; seed < 1500; ++seed) {
    Rng rng(mix_key({0x50CF, seed}));
    const LoadOptions options = random_options(rng);
    for (const std::string& source : load_names()) {
      const auto load = make_load_model(source, options);
      if (!load) {
        ASSERT_EQ(load.error().code, ErrorCode::kBadInput) << source << ", seed " << seed;
        std::string table = source;
        std::replace(table.begin(), table.end(), '-', '_');
        ASSERT_EQ(load.error().message.find(table), 0U) << load.error().message;
        continue;
      }
      ++made;
      for (const std::int64_t step : {std::int64_t{0}, options.inputs.steps - 1,
                                      static_cast<std::int64_t>(rng.below(1'000'000))}) {
        const auto valid = cost::validate((*load)->at(step));
        ASSERT_TRUE(valid) << source << ", seed " << seed << ", step " << step << ": "
                           << valid.error().message;
        ASSERT_FALSE(((*load)->announced_at(0) != cost::Announced::kNothing))
            << source << ", seed " << seed;
      }
    }
  }
  EXPECT_GT(made, 3000);
}

TEST(Sources, UnknownNamesGetTheNearest) {
  EXPECT_EQ(make_load_model("prunning", options_of("none", 1)).error().message,
            "unknown load model 'prunning', did you mean 'pruning'?");
}

TEST(Sources, ShapesThatMakeNoSenseAreRefused) {
  for (const std::string& source : load_names()) {
    LoadOptions options = options_of(source, 1);
    options.inputs.shape.hidden = 0;
    const auto load = make_load_model(source, options);
    ASSERT_FALSE(load) << source;
    EXPECT_EQ(load.error().code, ErrorCode::kBadInput) << source;
    options = options_of(source, 1);
    options.inputs.steps = 0;
    EXPECT_NE(make_load_model(source, options).error().message.find("steps is 0"),
              std::string::npos)
        << source;
  }
}

// The figures of docs/load-models.md: heaviest block / lightest, and heaviest layer / (work / 8).
TEST(Sources, DefaultsSpreadTheBlocksAsTheDocsSay) {
  struct Row {
    double min_spread, max_spread;
    double min_layer, max_layer;
  };
  const std::array<Row, 6> rows = {{{1.25, 1.6, 0.45, 0.55},
                                    {1.2, 1.35, 1.45, 1.5},
                                    {3.0, 3.02, 1.3, 1.55},
                                    {1.1, 1.2, 0.9, 0.95},
                                    {11, 16, 0.6, 0.95},
                                    {5.25, 5.45, 1.35, 1.45}}};
  const cost::Device device = cost::find_device("h100").value();
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const auto loads = default_loads(device, seed);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto model = (*loads)[i].load->at(6000);
      const auto work = cost::layer_work_s(model, 32);
      std::vector<double> blocks;
      for (std::size_t l = 1; l + 1 < work.size(); l += 2) blocks.push_back(work[l] + work[l + 1]);
      const auto [light, heavy] = std::minmax_element(blocks.begin(), blocks.end());
      const double layer = *std::max_element(work.begin(), work.end()) * 8 /
                           std::accumulate(work.begin(), work.end(), 0.0);
      EXPECT_GE(*heavy / *light, rows[i].min_spread) << (*loads)[i].name << ", seed " << seed;
      EXPECT_LE(*heavy / *light, rows[i].max_spread) << (*loads)[i].name << ", seed " << seed;
      EXPECT_GE(layer, rows[i].min_layer) << (*loads)[i].name << ", seed " << seed;
      EXPECT_LE(layer, rows[i].max_layer) << (*loads)[i].name << ", seed " << seed;
    }
  }
}

// As a training has them by default: a head's work on all tokens at the first exit.
TEST(Sources, ExitsThatTeachAllSpreadTheBlocksFurther) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    LoadOptions options;
    options.inputs = {.shape = default_shape("early-exit"),
                      .device = cost::find_device("h100").value(),
                      .seed = seed};
    const auto work = cost::layer_work_s((*make_load_model("early-exit", options))->at(6000), 32);
    std::vector<double> blocks;
    for (std::size_t l = 1; l + 1 < work.size(); l += 2) blocks.push_back(work[l] + work[l + 1]);
    const auto [light, heavy] = std::minmax_element(blocks.begin(), blocks.end());
    EXPECT_NEAR(*heavy / *light, 29, 0.5) << "seed " << seed;
  }
}

TEST(Sources, DefaultLoadsAreTheSix) {
  const auto kept = default_loads(arithmetic_device(), 4);
  const auto left_out = default_loads(arithmetic_device(), 4, Ends::kLeftOut);
  ASSERT_TRUE(kept && left_out);
  ASSERT_EQ(kept->size(), 6U);
  for (std::size_t i = 0; i < 6; ++i) {
    const auto whole = (*kept)[i].load->at(6000);
    const auto blocks = (*left_out)[i].load->at(6000);
    EXPECT_EQ((*kept)[i].name, load_names()[i + 1]);
    EXPECT_EQ(whole.size(), 66);
    ASSERT_EQ(blocks.size(), 64);
    EXPECT_EQ(blocks.layers.front(), whole.layers[1]);
    EXPECT_EQ(blocks.layers.back(), whole.layers[64]);
    // No layer is so heavy that it alone would decide over the step of 8 ranks.
    const auto work = cost::layer_work_s(blocks, 32);
    EXPECT_LT(*std::max_element(work.begin(), work.end()),
              std::accumulate(work.begin(), work.end(), 0.0) / 8 / 2)
        << (*left_out)[i].name;
  }
}

}  // namespace
}  // namespace dynmo::dynamism
