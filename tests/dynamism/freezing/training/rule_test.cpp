// SPDX-License-Identifier: Apache-2.0
// Freezing that follows the training and ends where the learning rate drops: the same bits however
// the layers lie.
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/training/sources.h"
#include "tests/runtime/blinking_source.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

constexpr int kRuleSteps = 30;
constexpr int kRuleMicroBatches = 6;

RunOptions by(const dynamism::FreezingOptions& rule, std::vector<int> cut) {
  RunOptions run{.steps = kRuleSteps, .micro_batches = kRuleMicroBatches, .cut = std::move(cut)};
  run.make_sources = freezing_by(rule);
  run.layers = shaped(model::make_llama(small_model()), run.make_sources);
  return run;
}

// The prefix before every step, as the first rank has it.
struct Prefixes {
  std::vector<int> layers = {};

  auto seen() {
    return [this](Pipeline& pipeline, std::int64_t) -> Expected<void> {
      if (pipeline.grid().rank() == WorldRank(0)) layers.push_back(pipeline.frozen_layers());
      return {};
    };
  }
};

struct NamedRule {
  std::string name;
  dynamism::FreezingOptions options;
};

class FreezingRules : public ::testing::TestWithParam<NamedRule> {
 protected:
  static RunOptions run_of(std::vector<int> cut) { return by(GetParam().options, std::move(cut)); }
};

TEST_P(FreezingRules, FreezeLayersAndTrainThemAgainInOneRun) {
  RunOptions run = run_of({3, 2, 3});
  Prefixes prefixes;
  run.before_step = prefixes.seen();
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  const std::vector<int>& layers = prefixes.layers;
  const auto most = std::ranges::max_element(layers);
  EXPECT_GE(*most, 2) << fmt::format("{}", fmt::join(layers, " "));
  EXPECT_GT(std::count(most, layers.end(), 0), 0) << fmt::format("{}", fmt::join(layers, " "));
}

TEST_P(FreezingRules, GiveTheSameBitsOnAnyRanksAndWhileLayersMove) {
  const RunResult single = run_pipeline(run_of({kLayers}));
  RunOptions plain = run_of({kLayers});
  plain.make_sources = {};
  EXPECT_NE(single.losses, run_pipeline(plain).losses) << "the rule does something";
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    Rng rng(mix_key({0x402A, seed}));
    const int ranks = 1 + static_cast<int>(seed);
    RunOptions run = run_of(random_cut(rng, kLayers, ranks));
    expect_same(single, run_pipeline(run), fmt::format("seed {}", seed));
    run.before_step = random_plans(seed, ranks, run.micro_batches);
    // Interleaved takes 6 micro-batches of at most 3 ranks.
    if (ranks <= 3) expect_same(single, run_pipeline(run), fmt::format("seed {}, moving", seed));
    run.before_step = {};
    run.balancing = Balancing::kAutomatic;
    expect_same(single, run_pipeline(run), fmt::format("seed {}, balanced", seed));
  }
}

TEST_P(FreezingRules, GiveTheSameBitsInReplicasAndRecomputed) {
  RunOptions run = run_of({kLayers});
  run.recompute = plan::Recompute::kWhole;
  expect_same(run_pipeline(run_of({kLayers})), run_pipeline(run), "recomputed");
  run = run_of({kLayers});
  run.replicas = 2;
  const RunResult alone = run_pipeline(run);
  run.cut = {4, 4};
  run.before_step = random_plans(5, 2, run.micro_batches);
  expect_same(alone, run_pipeline(run), "two replicas of two ranks, moving");
}

INSTANTIATE_TEST_SUITE_P(All, FreezingRules,
                         ::testing::Values(NamedRule{"norm", norm_rule()},
                                           NamedRule{"plasticity", plasticity_rule()}),
                         [](const auto& test) { return test.param.name; });

TEST(PlasticityRule, GivesTheSameBitsInBf16) {
  RunOptions run = by(plasticity_rule(), {kLayers});
  run.precision = cost::Precision::kBf16;
  const RunResult single = run_pipeline(run);
  run.cut = {3, 5};
  run.before_step = random_plans(11, 2, run.micro_batches);
  expect_same(single, run_pipeline(run), "two ranks, moving");
}

// Outputs of masked and compressed layers are compared with those of dense references.
TEST(PlasticityRule, FreezesPrunedLayers) {
  RunOptions run = by(plasticity_rule(), {kLayers});
  run.make_sources = [](std::int64_t steps) {
    dynamism::PruningOptions pruning;
    pruning.start = 2;
    pruning.end = 22;
    pruning.every = 5;
    dynamism::Sources sources;
    sources.push_back(dynamism::make_pruning_source(pruning));
    sources.push_back(dynamism::make_freezing_source(plasticity_rule(), steps));
    return sources;
  };
  Prefixes prefixes;
  run.before_step = prefixes.seen();
  const RunResult single = run_pipeline(run);
  EXPECT_GE(std::ranges::max(prefixes.layers), 1)
      << fmt::format("{}", fmt::join(prefixes.layers, " "));
  for (const int ranks : {2, 3}) {
    run.cut = ranks == 2 ? std::vector{3, 5} : std::vector{2, 4, 2};
    run.before_step = random_plans(13, ranks, run.micro_batches);
    expect_same(single, run_pipeline(run), fmt::format("{} ranks, moving", ranks));
  }
}

// The comparisons above notice a reference that stays behind.
TEST(PlasticityRule, AReferenceThatIsWithheldShows) {
  const RunResult still = run_pipeline(by(plasticity_rule(), {3, 5}));
  RunOptions run = by(plasticity_rule(), {3, 5});
  run.before_step = [](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != 9) return {};
    DYNMO_TRY(pipeline.apply(plan::make_plan({5, 3}, schedule::ScheduleKind::k1F1B, 1)));
    const auto moved = pipeline.states().find(LayerId(3));
    if (moved == pipeline.states().end()) return {};
    for (model::Buffer& buffer : moved->second.buffers) buffer.value.zero_();
    return {};
  };
  const RunResult moving = run_pipeline(run);
  ASSERT_TRUE(moving.status.has_value()) << moving.status.error().message;
  EXPECT_NE(still.losses, moving.losses);
}

TEST(PlasticityRule, BytesThatThePlannerKnowsHaveTheReferences) {
  RunOptions run = by(plasticity_rule(), {3, 5});
  run.before_step = [](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != 0) return {};
    const cost::ModelCost& known = pipeline.profiler().known();
    for (const auto& [id, state] : pipeline.states()) {
      const cost::LayerCost& layer = known.layers[id.index()];
      EXPECT_EQ(layer.parameter_bytes + layer.optimizer_bytes, model::tensor_bytes(state))
          << "layer " << id.value;
      // The last two of eight layers can never freeze with the default max_fraction.
      EXPECT_EQ(state.buffers.empty(), id.value >= 6) << "layer " << id.value;
    }
    return {};
  };
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
}

TEST(PlasticityRule, AModelThatNoSourceHasShapedIsRefused) {
  const auto source = dynamism::make_freezing_source(plasticity_rule(), kRuleSteps);
  const auto fit = source->check({.model = model::make_llama(small_model()), .ties = {}});
  ASSERT_FALSE(fit.has_value());
  EXPECT_EQ(fit.error().code, ErrorCode::kBadInput);
  EXPECT_NE(fit.error().message.find("freezing.rule is plasticity"), std::string::npos);
}

}  // namespace
}  // namespace dynmo::runtime::testing
