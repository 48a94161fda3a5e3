// SPDX-License-Identifier: Apache-2.0
// Both families with tied embeddings: pipelined = one rank, and moved = never moved, bit for bit.
#include <gtest/gtest.h>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/decoder.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

// A model of small_model()'s sizes, tied.
model::DecoderConfig tied(cost::Family family) {
  const model::LlamaConfig sizes = small_model();
  if (family == cost::Family::kLlama) {
    model::LlamaConfig config = sizes;
    config.tied_embeddings = true;
    return config;
  }
  model::Gpt2Config config;
  config.shape = sizes.shape;
  config.shape.kv_heads = 0;
  config.shape.positions = config.shape.sequence + 3;
  config.dropout = sizes.dropout;
  return config;
}

class Families : public ::testing::TestWithParam<cost::Family> {
 protected:
  [[nodiscard]] RunOptions options(int steps, int micro_batches) const {
    const model::DecoderConfig config = tied(GetParam());
    RunOptions options;
    options.steps = steps;
    options.micro_batches = micro_batches;
    options.layers = model::make_decoder(config);
    options.ties = model::ties(config);
    return options;
  }
};

TEST_P(Families, AnyScheduleOnUpToThreeRanksEqualsOneRankBitForBit) {
  constexpr std::uint64_t kSeed = 41;
  for (const int ranks : {2, 3}) {
    RunOptions single = options(8, 2 * ranks);  // what interleaved takes
    single.cut = {kLayers};
    const RunResult expected = run_pipeline(single);
    Rng rng(mix_key({kSeed, static_cast<std::uint64_t>(ranks)}));
    for (const auto kind : kKinds) {
      RunOptions pipelined = options(8, 2 * ranks);
      pipelined.plan = random_plan(rng, kind, kLayers, ranks, 2 * ranks);
      expect_same(expected, run_pipeline(pipelined),
                  fmt::format("seed {}, {} {}", kSeed, schedule::name(kind),
                              plan::to_string(*pipelined.plan)));
    }
  }
}

// GPT-2 holds its matrices transposed, with biases; the tied pair is not pruned.
TEST_P(Families, PrunedTheyChangeNoBitWhileLayersMoveAndTrainAsMaskedOnesDo) {
  constexpr std::uint64_t kSeed = 47;
  constexpr int kRanks = 3;
  constexpr int kMicroBatches = 6;
  const auto pruned = [&](double sparse_above) {
    RunOptions run = options(12, kMicroBatches);
    run.cut = {kLayers};
    run.make_sources = [sparse_above](std::int64_t) {
      dynamism::PruningOptions pruning;
      pruning.start = 1;
      pruning.end = 7;
      pruning.every = 3;
      pruning.sparse_above = sparse_above;
      dynamism::Sources sources;
      sources.push_back(dynamism::make_pruning_source(pruning));
      return sources;
    };
    return run;
  };
  const RunResult single = run_pipeline(pruned(0.7));
  RunOptions moving = pruned(0.7);
  moving.cut = {3, 2, 3};
  moving.before_step = random_plans(kSeed, kRanks, kMicroBatches);
  expect_same(single, run_pipeline(moving), fmt::format("seed {}", kSeed));
  const RunResult masked = run_pipeline(pruned(1));
  for (std::size_t i = 0; i < masked.losses.size(); ++i) {
    EXPECT_NEAR(masked.losses[i], single.losses[i], 1e-5) << "step " << i;
  }
}

TEST_P(Families, RandomChangesOfPlanEveryThreeStepsChangeNoBit) {
  constexpr std::uint64_t kSeed = 43;
  constexpr int kRanks = 3;
  constexpr int kMicroBatches = 6;
  RunOptions moving = options(60, kMicroBatches);
  moving.cut = {3, 2, 3};
  RunOptions still = moving;
  std::set<schedule::ScheduleKind> seen;
  std::set<Rank> owners_of_head;
  std::mutex mutex;
  moving.before_step = random_plans(
      kSeed, kRanks, kMicroBatches, [&](const Pipeline& pipeline, schedule::ScheduleKind kind) {
        const std::lock_guard lock(mutex);
        seen.insert(kind);
        owners_of_head.insert(pipeline.plan().owner(LayerId(kLayers - 1)));
      });
  expect_same(run_pipeline(still), run_pipeline(moving), fmt::format("seed {}", kSeed));
  EXPECT_EQ(seen.size(), kKinds.size());
  EXPECT_GT(owners_of_head.size(), 1U);
}

// That the tie is there, and does something.
TEST_P(Families, WithoutTheirTieTrainDifferently) {
  RunOptions run = options(4, 4);
  run.cut = {3, 2, 3};
  const RunResult tied_run = run_pipeline(run);
  run.ties.clear();
  const RunResult untied_run = run_pipeline(run);
  ASSERT_TRUE(tied_run.status.has_value() && untied_run.status.has_value());
  EXPECT_NE(tied_run.losses, untied_run.losses);
}

INSTANTIATE_TEST_SUITE_P(Tied, Families,
                         ::testing::Values(cost::Family::kLlama, cost::Family::kGpt2),
                         [](const auto& test) { return std::string(cost::name(test.param)); });

}  // namespace
}  // namespace dynmo::runtime::testing
