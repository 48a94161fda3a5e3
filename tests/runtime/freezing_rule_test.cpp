// SPDX-License-Identifier: Apache-2.0
// Freezing that follows the gradients and ends where the learning rate drops: the same bits however
// the layers lie.
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

constexpr int kRuleSteps = 30;
constexpr int kRuleMicroBatches = 6;

RunOptions by_norm(std::vector<int> cut) {
  RunOptions run{.steps = kRuleSteps, .micro_batches = kRuleMicroBatches, .cut = std::move(cut)};
  run.make_sources = [](std::int64_t steps) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_freezing_source(norm_rule(), steps));
    return sources;
  };
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

TEST(NormRule, FreezesLayersAndTrainsThemAgainInOneRun) {
  RunOptions run = by_norm({3, 2, 3});
  Prefixes prefixes;
  run.before_step = prefixes.seen();
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  const std::vector<int>& layers = prefixes.layers;
  const auto most = std::ranges::max_element(layers);
  EXPECT_GE(*most, 2) << fmt::format("{}", fmt::join(layers, " "));
  EXPECT_GT(std::count(most, layers.end(), 0), 0) << fmt::format("{}", fmt::join(layers, " "));
}

TEST(NormRule, GivesTheSameBitsOnAnyRanksAndWhileLayersMove) {
  const RunResult single = run_pipeline(by_norm({kLayers}));
  RunOptions plain = by_norm({kLayers});
  plain.make_sources = {};
  EXPECT_NE(single.losses, run_pipeline(plain).losses) << "the rule does something";
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    Rng rng(mix_key({0x402A, seed}));
    const int ranks = 2 + static_cast<int>(seed % 2);
    RunOptions run = by_norm(random_cut(rng, kLayers, ranks));
    expect_same(single, run_pipeline(run), fmt::format("seed {}", seed));
    run.before_step = random_plans(seed, ranks, run.micro_batches);
    expect_same(single, run_pipeline(run), fmt::format("seed {}, moving", seed));
    run.before_step = {};
    run.balancing = Balancing::kAutomatic;
    expect_same(single, run_pipeline(run), fmt::format("seed {}, balanced", seed));
  }
}

TEST(NormRule, GivesTheSameBitsInReplicasAndRecomputed) {
  RunOptions run = by_norm({kLayers});
  run.recompute = plan::Recompute::kWhole;
  expect_same(run_pipeline(by_norm({kLayers})), run_pipeline(run), "recomputed");
  run = by_norm({kLayers});
  run.replicas = 2;
  const RunResult alone = run_pipeline(run);
  run.cut = {4, 4};
  run.before_step = random_plans(5, 2, run.micro_batches);
  expect_same(alone, run_pipeline(run), "two replicas of two ranks, moving");
}

}  // namespace
}  // namespace dynmo::runtime::testing
