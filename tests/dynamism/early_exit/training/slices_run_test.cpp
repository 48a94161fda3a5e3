// SPDX-License-Identifier: Apache-2.0
// Exits whose heads lie in slices in a pipeline: any ranks, cut, schedule and move has the bits of
// one rank, and the losses are those of exits with whole heads.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/decoder.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

using dynamism::EarlyExitOptions;
using dynamism::ExitConfidence;

constexpr std::int64_t kWords = 4 * 128 + 61;

struct ExitsCase {
  std::int64_t slices = 3;
  ExitConfidence confidence = ExitConfidence::kGap;
  double exit_loss = 0.1;
  cost::Precision precision = cost::Precision::kFp32;
  cost::Family family = cost::Family::kLlama;
};
void PrintTo(const ExitsCase& c, std::ostream* out) {
  *out << c.slices << " slices, confidence " << static_cast<int>(c.confidence) << ", loss "
       << c.exit_loss << ", " << cost::name(c.family)
       << (c.precision == cost::Precision::kBf16 ? ", bf16" : "");
}

RunOptions sliced_run(const ExitsCase& c, int steps, bool freezes = false) {
  EarlyExitOptions options;
  options.survivors = 0.3;
  options.exit_every = 1;
  options.warm_up = 2;
  options.ramp_steps = 3;
  options.confidence = c.confidence;
  options.exit_loss = c.exit_loss;
  const auto sources = [options, freezes](std::int64_t all) {
    dynamism::Sources made;
    if (freezes) made.push_back(dynamism::make_freezing_source({.schedule = freezing()}, all));
    made.push_back(dynamism::make_early_exit_source(options));
    return made;
  };
  const model::LlamaConfig sizes = small_model();
  model::DecoderConfig config = sizes;
  if (c.family == cost::Family::kGpt2) {
    model::Gpt2Config gpt2;
    gpt2.shape = sizes.shape;
    gpt2.shape.kv_heads = 0;
    gpt2.shape.positions = sizes.shape.sequence;
    gpt2.tied_embeddings = false;
    config = gpt2;
  }
  std::visit(
      [&](auto& decoder) {
        decoder.shape.vocabulary = kWords;
        decoder.shape.head_slices = c.slices;
      },
      config);
  RunOptions run{.steps = steps, .micro_batches = 4, .make_sources = sources};
  model::Recipe recipe = model::make_recipe(config);
  EXPECT_TRUE(dynamism::make_early_exit_source(options)->shape(recipe));
  run.layers = model::layers_of(std::move(recipe));
  run.precision = c.precision;
  run.vocabulary = kWords;
  run.row_room = 0.7;  // so that second messages are sent, too
  run.cut = {static_cast<int>(run.layers.size())};
  return run;
}

class SlicedExits : public ::testing::TestWithParam<ExitsCase> {};

TEST_P(SlicedExits, AnyScheduleOnUpToFourRanksEqualsOneRankBitForBit) {
  constexpr std::uint64_t kSeed = 51;
  for (const int ranks : {2, 4}) {
    RunOptions run = sliced_run(GetParam(), 8);
    run.micro_batches = 2 * ranks;
    const int layers = run.cut[0];
    const RunResult one = run_pipeline(run);
    Rng rng(mix_key({kSeed, static_cast<std::uint64_t>(ranks)}));
    for (const auto kind : kKinds) {
      run.plan = random_plan(rng, kind, layers, ranks, 2 * ranks);
      expect_same(
          one, run_pipeline(run),
          fmt::format("seed {}, {} {}", kSeed, schedule::name(kind), plan::to_string(*run.plan)));
    }
  }
}

TEST_P(SlicedExits, RandomChangesOfPlanWithFreezingChangeNoBit) {
  constexpr std::uint64_t kSeed = 53;
  constexpr int kRanks = 3;
  RunOptions still = sliced_run(GetParam(), 24, /*freezes=*/true);
  still.micro_batches = 6;
  still.cut = {4, 3, still.cut[0] - 7};
  RunOptions moving = still;
  moving.before_step = random_plans(kSeed, kRanks, 6);
  expect_same(run_pipeline(still), run_pipeline(moving), fmt::format("seed {}", kSeed));
}

TEST_P(SlicedExits, ReplicasAndRecomputationChangeNoBit) {
  RunOptions run = sliced_run(GetParam(), 8);
  const int layers = run.cut[0];
  run.accumulation = 2;
  const RunResult one = run_pipeline(run);
  run.cut = {4, layers - 4};
  run.recompute = plan::Recompute::kWhole;
  expect_same(one, run_pipeline(run), "recomputed");
  RunOptions replicas = sliced_run(GetParam(), 8);
  replicas.replicas = 2;
  const RunResult of_one_rank = run_pipeline(replicas);
  replicas.cut = {5, layers - 6, 1};
  expect_same(of_one_rank, run_pipeline(replicas), "two replicas");
}

// Sums are in another order; the start and the path are the same. Thresholds that follow counts may
// let another row go where two are nearly equally sure.
TEST_P(SlicedExits, TrainAsExitsWithWholeHeadsDo) {
  ExitsCase c = GetParam();
  const RunResult found = run_pipeline(sliced_run(c, 8));
  c.slices = 1;
  const RunResult expected = run_pipeline(sliced_run(c, 8));
  ASSERT_TRUE(expected.status && found.status);
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (std::size_t step = 0; step < expected.losses.size(); ++step) {
    const bool exact = c.precision == cost::Precision::kFp32 && step < 3;
    EXPECT_NEAR(found.losses[step], expected.losses[step], exact ? 1e-5 : 5e-2) << step;
  }
  EXPECT_NE(found.losses.front(), found.losses.back());
}

INSTANTIATE_TEST_SUITE_P(
    Of, SlicedExits,
    ::testing::Values(ExitsCase{}, ExitsCase{.slices = 2, .exit_loss = 0},
                      ExitsCase{.slices = 4, .confidence = ExitConfidence::kClassifier},
                      ExitsCase{.confidence = ExitConfidence::kSimilarity, .exit_loss = 0},
                      ExitsCase{.precision = cost::Precision::kBf16},
                      ExitsCase{.family = cost::Family::kGpt2}));

}  // namespace
}  // namespace dynmo::runtime::testing
