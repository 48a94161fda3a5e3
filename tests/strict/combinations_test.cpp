// SPDX-License-Identifier: Apache-2.0
// Techniques that train on devices, with each setting of a run. On the strict device they give the
// losses of the CPU within a tolerance, and their own bits on other ranks and while layers move. So
// this is verified without a GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/decoder.h"
#include "tests/runtime/blinking_source.h"
#include "tests/runtime/pipeline_fixture.h"
#include "tests/strict/like_cpu.h"
#include "tests/support/samples.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::runtime::testing {
namespace {

enum class Technique { kDense, kFreezing, kDepths, kPruning, kUnits, kExits, kExperts, kHash };
constexpr std::array kTechniques = {Technique::kDense,   Technique::kFreezing, Technique::kDepths,
                                    Technique::kPruning, Technique::kUnits,    Technique::kExits,
                                    Technique::kExperts, Technique::kHash};

std::string_view name_of(Technique technique) {
  if (technique == Technique::kDepths) return "depths";
  if (technique == Technique::kPruning) return "pruning";
  if (technique == Technique::kUnits) return "units";
  if (technique == Technique::kExits) return "exits";
  if (technique == Technique::kExperts) return "experts";
  if (technique == Technique::kHash) return "hash";
  return technique == Technique::kDense ? "dense" : "freezing";
}

dynamism::MakeSources depths() {
  return [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_mixture_of_depths_source(
        {.capacity = 0.25, .every = 1, .first_block = 1}));  // two of three blocks
    return sources;
  };
}

// Behind two of three blocks. At the end a third of the tokens is left.
dynamism::MakeSources exits(dynamism::ExitConfidence confidence, double loss) {
  return [=](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_early_exit_source({.survivors = 0.3,
                                                        .exit_every = 1,
                                                        .warm_up = 2,
                                                        .ramp_steps = 3,
                                                        .confidence = confidence,
                                                        .exit_loss = loss}));
    return sources;
  };
}

dynamism::MakeSources hash() {
  return [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_sparse_attention_source({.buckets = 4}));
    return sources;
  };
}

// At three steps, to 80 %. The CPU compresses what has lost more than 65 %.
dynamism::MakeSources pruning() {
  return [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_pruning_source(
        {.start = 4, .end = 12, .every = 4, .initial_sparsity = 0.3, .final_sparsity = 0.8}));
    return sources;
  };
}

// Whole units, at the same steps, to 60 %.
dynamism::MakeSources units() {
  return [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_pruning_source({.start = 4,
                                                     .end = 12,
                                                     .every = 4,
                                                     .initial_sparsity = 0.3,
                                                     .final_sparsity = 0.6,
                                                     .form = dynamism::PruningForm::kUnits}));
    return sources;
  };
}

// Two of four for each token, of any number of tokens.
dynamism::MakeSources experts() {
  return [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(
        dynamism::make_moe_source({.experts = 4, .expert_hidden = 16, .expert_ranks = 1}));
    return sources;
  };
}

struct DeviceCell {
  Technique technique;
  cost::Precision precision;
  std::string_view setting;
};

constexpr std::array<std::string_view, 9> kSettings = {"plain", "recompute", "head_slices",
                                                       "tied",  "replicas",  "accumulation",
                                                       "gpt2",  "zb_v",      "moves"};

std::vector<DeviceCell> device_cells() {
  std::vector<DeviceCell> all;
  std::uint64_t cells = 0;
  for (const Technique technique : kTechniques) {
    for (const auto precision : {cost::Precision::kFp32, cost::Precision::kBf16}) {
      for (const std::string_view setting : kSettings) {
        // Refused: dynamism/combinations.
        if (technique == Technique::kFreezing && setting == "tied") continue;
        // Cells of dense training have the settings that change nothing in a routed block.
        const bool fp32 = precision == cost::Precision::kFp32;
        const bool changes = fp32
                                 ? setting == "recompute" || setting == "gpt2" || setting == "moves"
                                 : setting == "plain";
        if (technique == Technique::kDepths && !changes) continue;
        // Gradients are masked before and after those of replicas are added.
        const bool masks = fp32 ? setting == "moves" || setting == "replicas" : setting == "plain";
        if (technique == Technique::kPruning && !masks) continue;
        const bool shrinks = fp32 ? setting == "moves" || setting == "gpt2" || setting == "replicas"
                                  : setting == "plain";
        if (technique == Technique::kUnits && !shrinks) continue;
        const bool leaves = fp32 ? setting == "moves" || setting == "gpt2" : setting == "plain";
        if (technique == Technique::kExits && !leaves) continue;
        const bool routes =
            fp32 ? setting == "moves" || setting == "recompute" || setting == "replicas"
                 : setting == "plain";
        if (technique == Technique::kExperts && !routes) continue;
        if (technique == Technique::kHash && !changes) continue;
        if (draws(++cells, 2)) all.push_back({technique, precision, setting});
      }
    }
  }
  return all;
}

RunOptions run_of(const DeviceCell& cell) {
  model::LlamaConfig llama = small_model();
  llama.tied_embeddings = cell.setting == "tied";
  if (cell.setting == "head_slices") {
    llama.shape.vocabulary = 300;
    llama.shape.head_slices = 2;
  }
  model::DecoderConfig decoder = llama;
  if (cell.setting == "gpt2") {
    model::Gpt2Config gpt2;
    gpt2.shape = llama.shape;
    gpt2.shape.kv_heads = 0;
    gpt2.shape.positions = gpt2.shape.sequence;
    gpt2.tied_embeddings = false;
    decoder = gpt2;
  }
  RunOptions run{.steps = 20};
  run.layers = model::make_decoder(decoder);
  run.ties = model::ties(decoder);
  if (cell.technique == Technique::kDepths) {
    run.make_sources = depths();
    run.layers = shaped(std::move(run.layers), run.make_sources);
  }
  if (cell.technique == Technique::kPruning) run.make_sources = pruning();
  if (cell.technique == Technique::kUnits) run.make_sources = units();
  if (cell.technique == Technique::kExperts) {
    run.make_sources = experts();
    run.layers = shaped(std::move(run.layers), run.make_sources);
  }
  if (cell.technique == Technique::kExits) {
    // Each setting has another way to decide. In bf16 roundings let other tokens leave, least by
    // the classifier. A test of its own below compares the others.
    auto confidence = dynamism::ExitConfidence::kGap;
    if (cell.precision == cost::Precision::kBf16)
      confidence = dynamism::ExitConfidence::kClassifier;
    if (cell.setting == "gpt2") confidence = dynamism::ExitConfidence::kSimilarity;
    run.make_sources = exits(confidence, cell.setting == "gpt2" ? 0 : 0.1);
    run.layers = shaped(std::move(run.layers), run.make_sources);
  }
  if (cell.technique == Technique::kHash) {
    run.make_sources = hash();
    run.layers = shaped(std::move(run.layers), run.make_sources);
  }
  // At the peak of the others, roundings of bf16 alone grow beyond the tolerance in 20 steps, also
  // if every row is chosen. Those of weights near the threshold decide which of them are removed.
  const bool chooses =
      cell.technique != Technique::kDense && cell.technique != Technique::kFreezing;
  if (chooses) run.learning_rate = 3e-3;
  run.cut = {static_cast<int>(run.layers.size())};
  run.precision = cell.precision;
  if (cell.technique == Technique::kFreezing) run.freezing = freezing();
  if (cell.setting == "recompute") run.recompute = plan::Recompute::kWhole;
  if (cell.setting == "replicas") run.replicas = 2;
  if (cell.setting == "accumulation") run.accumulation = 2;
  if (cell.setting == "moves") run.micro_batches = 6;  // as each schedule takes them on 3 ranks
  return run;
}

// Returns the same training on more ranks.
RunOptions elsewhere(RunOptions run, const DeviceCell& cell) {
  const int layers = run.cut[0];
  run.cut = {3, layers - 3};
  if (cell.setting == "zb_v") {
    run.plan = plan::make_plan({2, 2, 2, layers - 6}, schedule::wave_placement(2, 2), 2,
                               schedule::ScheduleKind::kZbV);
  }
  if (cell.setting == "moves") {
    run.cut = {3, 2, layers - 5};
    run.before_step = random_plans(/*seed=*/31, 3, run.micro_batches, {}, MoveHow::kDuringStep);
  }
  return run;
}

class OnStrictDevice : public ::testing::TestWithParam<DeviceCell> {
 protected:
  static void SetUpTestSuite() { drawn_by("half of the cells on the strict device"); }
};

TEST_P(OnStrictDevice, TrainsLikeTheCpuAndToItsOwnBitsAnywhere) {
  const DeviceCell& cell = GetParam();
  RunOptions run = run_of(cell);
  run.staging.device = at::kCPU;
  const RunResult expected = run_pipeline(run);
  ASSERT_TRUE(expected.status) << expected.status.error().message;
  run.staging.device = strict::open(0);
  const RunResult one = run_pipeline(run);
  ASSERT_TRUE(one.status) << one.status.error().message;
  ASSERT_EQ(one.losses.size(), 20U);
  const double largest =
      dynmo::testing::expect_like_cpu(one.losses, expected.losses, cell.precision);
  RecordProperty("distance", fmt::format("{:.1e}", largest));
  expect_same(one, run_pipeline(elsewhere(run, cell)), "one rank and more");
}

INSTANTIATE_TEST_SUITE_P(Cells, OnStrictDevice, ::testing::ValuesIn(device_cells()),
                         [](const auto& test) {
                           const DeviceCell& cell = test.param;
                           return fmt::format(
                               "{}_{}_{}", name_of(cell.technique),
                               cell.precision == cost::Precision::kFp32 ? "fp32" : "bf16",
                               cell.setting);
                         });

// Returns the figures of the run's source by step.
std::vector<Json> figures_of(RunOptions run) {
  std::vector<Json> all;
  run.before_step = [&all](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step > 0) all.push_back(pipeline.sources().front()->figures());
    return {};
  };
  const RunResult result = run_pipeline(run);
  EXPECT_TRUE(result.status) << result.status.error().message;
  return all;
}

// Figures of `same` are equal on the CPU and on the strict device. Those of `near`, two losses, may
// differ by roundings. Returns the figures of the last step.
Json expect_figures_of_the_cpu(RunOptions run, const std::vector<std::string>& same,
                               const std::string& near) {
  run.staging.device = at::kCPU;
  const std::vector<Json> expected = figures_of(run);
  run.staging.device = strict::open(0);
  const std::vector<Json> actual = figures_of(run);
  EXPECT_EQ(std::ssize(expected), run.steps - 1);
  EXPECT_EQ(actual.size(), expected.size());
  for (std::size_t step = 0; step < std::min(actual.size(), expected.size()); ++step) {
    for (const std::string& key : same) {
      EXPECT_EQ(actual[step].at(key), expected[step].at(key)) << key << ", step " << step;
    }
    for (std::size_t i = 0; i < 2; ++i) {
      const auto loss = expected[step].at(near).at(i).get<double>();
      EXPECT_NEAR(actual[step].at(near).at(i).get<double>(), loss, 1e-5 * loss) << step;
    }
  }
  return actual.empty() ? Json() : actual.back();
}

TEST(FiguresOnStrictDevice, OfMixtureOfDepthsAreThoseOfTheCpu) {
  RunOptions run = run_of({Technique::kDepths, cost::Precision::kFp32, "plain"});
  run.steps = 4;
  expect_figures_of_the_cpu(run, {"rows", "share", "predicted", "accuracy"}, "predictor_loss");
}

TEST(FiguresOnStrictDevice, OfSparseAttentionAreThoseOfTheCpu) {
  RunOptions run = run_of({Technique::kHash, cost::Precision::kFp32, "plain"});
  run.steps = 6;
  run.staging.device = at::kCPU;
  const std::vector<Json> expected = figures_of(run);
  run.staging.device = strict::open(0);
  const std::vector<Json> actual = figures_of(run);
  ASSERT_EQ(expected.size(), 5U);
  EXPECT_EQ(actual, expected);
  EXPECT_LT(actual.back().at("share").get<double>(), 0.9);
}

TEST(ExitsOnStrictDevice, GoOnWhenAllTokensLeaveAtTheFirst) {
  RunOptions run = run_of({Technique::kExits, cost::Precision::kFp32, "plain"});
  run.steps = 4;
  run.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(
        dynamism::make_early_exit_source({.exit_every = 1, .warm_up = 1, .threshold = 1e-9}));
    return sources;
  };
  run.staging.device = at::kCPU;
  const RunResult expected = run_pipeline(run);
  ASSERT_TRUE(expected.status) << expected.status.error().message;
  run.staging.device = strict::open(0);
  const RunResult one = run_pipeline(run);
  ASSERT_TRUE(one.status) << one.status.error().message;
  dynmo::testing::expect_like_cpu(one.losses, expected.losses, cost::Precision::kFp32);
  run.cut = {5, 3};
  expect_same(one, run_pipeline(run), "two ranks");
}

// If exits learn nothing, the head scores all rows only for the gap.
TEST(FiguresOnStrictDevice, OfEarlyExitAreThoseOfTheCpu) {
  for (const double weight : {0.1, 0.0}) {
    SCOPED_TRACE(weight);
    RunOptions run = run_of({Technique::kExits, cost::Precision::kFp32, "plain"});
    run.make_sources = exits(dynamism::ExitConfidence::kGap, weight);
    run.layers = shaped(model::make_llama(small_model()), run.make_sources);
    run.steps = 8;
    const Json last =
        expect_figures_of_the_cpu(run, {"left", "tokens", "scored", "right", "thresholds"}, "loss");
    EXPECT_GT(last.at("left").at(0).get<double>(), 0);
  }
}

// Losses, and the tokens that leave at each exit, by step.
struct ExitsByStep {
  std::vector<double> losses;
  std::vector<std::vector<double>> left;
};

ExitsByStep exits_by_step(RunOptions run) {
  ExitsByStep all;
  run.before_step = [&all](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step == 0) return {};
    all.left.push_back(pipeline.sources().front()->figures().at("left").get<std::vector<double>>());
    return {};
  };
  const RunResult result = run_pipeline(run);
  EXPECT_TRUE(result.status) << result.status.error().message;
  all.losses = result.losses;
  return all;
}

// Confidences are fp32 numbers, but of bf16 rows, whose last bits differ between kernels. So a
// token near the threshold leaves here and stays there. Until the first such token the losses
// differ by roundings alone, and then by 1e-3 at once. Its step depends on every rounding. So
// several weights of the exits' losses are tried, and one of them must lead past some exits.
TEST(ExitsOnStrictDevice, InBf16DifferFromTheCpuByTokensAtTheThresholdAlone) {
  for (const auto confidence :
       {dynamism::ExitConfidence::kGap, dynamism::ExitConfidence::kSimilarity}) {
    std::size_t most = 0;  // steps in which the same tokens leave, three of them before any does
    for (const double weight : {0.02, 0.05, 0.1, 0.12, 0.2}) {
      RunOptions run = run_of({Technique::kExits, cost::Precision::kBf16, "plain"});
      run.make_sources = exits(confidence, weight);
      run.layers = shaped(model::make_llama(small_model()), run.make_sources);
      run.steps = 12;
      run.staging.device = at::kCPU;
      const ExitsByStep cpu = exits_by_step(run);
      run.staging.device = strict::open(0);
      const ExitsByStep device = exits_by_step(run);
      ASSERT_EQ(device.left.size(), cpu.left.size());
      const auto first = static_cast<std::size_t>(std::ranges::mismatch(device.left, cpu.left).in1 -
                                                  device.left.begin());
      ASSERT_GE(first, 3U);
      EXPECT_GT(cpu.left[3][0], 0);
      most = std::max(most, first);
      for (std::size_t step = 0; step < first; ++step) {
        EXPECT_NEAR(device.losses[step] / cpu.losses[step], 1, 1e-4) << "step " << step;
      }
      if (first == cpu.left.size()) continue;
      double others = 0;  // of 96 tokens, counted where they leave and where they do not
      for (std::size_t exit = 0; exit < cpu.left[first].size(); ++exit) {
        others += std::abs(device.left[first][exit] - cpu.left[first][exit]) / 2;
      }
      EXPECT_LE(others, 4) << "weight " << weight << ", step " << first;
      EXPECT_NEAR(device.losses[first] / cpu.losses[first], 1, 3e-3)
          << "weight " << weight << ", step " << first;
    }
    EXPECT_GE(most, 4U);
  }
}

}  // namespace
}  // namespace dynmo::runtime::testing
