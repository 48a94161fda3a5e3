// SPDX-License-Identifier: Apache-2.0
// Pruning in real training: the same bits under any layout, exactly as many weights as the schedule
// leaves, and the same training in both formats.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/pruning/load.h"
#include "dynmo/dynamism/pruning/select.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/pruned.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

constexpr int kSteps = 18;
constexpr int kMicroBatches = 12;  // what interleaved takes of 1 to 3 ranks

dynamism::PruningOptions events(double sparse_above = 0.6) {
  dynamism::PruningOptions options;
  options.start = 2;
  options.end = 14;
  options.every = 4;
  options.sparse_above = sparse_above;
  return options;
}

RunOptions with(const dynamism::PruningOptions& options, std::vector<int> cut) {
  RunOptions run{.steps = kSteps, .micro_batches = kMicroBatches, .cut = std::move(cut)};
  run.make_sources = [options](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_pruning_source(options));
    return sources;
  };
  return run;
}

class Pruned : public ::testing::TestWithParam<schedule::ScheduleKind> {};

// Masked at first, then compressed, matrix by matrix; layers move in both formats.
TEST_P(Pruned, GiveTheSameBitsOnOneToThreeRanksAndWhileLayersMove) {
  const RunResult single = run_pipeline(with(events(), {kLayers}));
  const RunResult dense =
      run_pipeline({.steps = kSteps, .micro_batches = kMicroBatches, .cut = {kLayers}});
  EXPECT_NE(single.losses, dense.losses) << "the source does something";
  constexpr std::uint64_t kSeed = 43;
  for (const int ranks : {2, 3}) {
    Rng rng(mix_key({kSeed, static_cast<std::uint64_t>(ranks)}));
    RunOptions run = with(events(), {});
    run.plan = random_plan(rng, GetParam(), kLayers, ranks, kMicroBatches);
    const std::string what = fmt::format("seed {}, {}", kSeed, plan::to_string(*run.plan));
    expect_same(single, run_pipeline(run), what);
    run.before_step = random_plans(kSeed, ranks, kMicroBatches);
    expect_same(single, run_pipeline(run), what + ", moving");
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, Pruned, ::testing::ValuesIn(kKinds), [](const auto& test) {
  std::string text(schedule::name(test.param));
  std::replace(text.begin(), text.end(), '-', '_');
  return text;
});

TEST(Pruning, ReplicasAndRecomputationChangeNoBit) {
  RunOptions run = with(events(), {kLayers});
  run.replicas = 2;
  const RunResult whole = run_pipeline(run);
  run.cut = {3, 5};
  expect_same(whole, run_pipeline(run), "two ranks a replica");
  run.recompute = plan::Recompute::kWhole;
  expect_same(whole, run_pipeline(run), "recomputed");
}

// The expected count is the sum of what the ranks hold before each step.
TEST(Pruning, LeavesExactlyWhatTheScheduleSays) {
  const dynamism::PruningOptions options = events();
  RunOptions run = with(options, {3, 5});
  std::mutex mutex;
  std::map<std::int64_t, std::int64_t> kept;  // by step, after its event
  std::int64_t weights = 0;
  std::map<std::int64_t, double> least;  // density of a matrix
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    const std::lock_guard lock(mutex);
    for (const auto& [id, state] : pipeline.states()) {
      const auto specs = pipeline.model()[id.index()]->parameters();
      for (std::size_t i = 0; i < specs.size(); ++i) {
        if (!specs[i].prunable) continue;
        const std::int64_t all = specs[i].shape[0] * specs[i].shape[1];
        const model::Parameter& parameter = state.parameters[i];
        const std::int64_t left =
            parameter.mask.defined() ? model::kept_weights(parameter.mask) : all;
        kept[step] += left;
        weights += step == 0 ? all : 0;
        const double density = static_cast<double>(left) / static_cast<double>(all);
        least[step] = std::min(least.try_emplace(step, 1).first->second, density);
        EXPECT_EQ(model::is_compressed(parameter), density < 1 - *options.sparse_above);
        EXPECT_EQ(model::kept_values(parameter).numel(), left);
      }
    }
    return {};
  };
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  EXPECT_EQ(kept.at(0), weights);
  for (int step = 1; step < kSteps; ++step) {
    const double sparsity = dynamism::sparsity_at(options, step - 1);
    EXPECT_EQ(kept.at(step), std::llround((1 - sparsity) * static_cast<double>(weights)))
        << "before step " << step;
    EXPECT_GE(least.at(step), 1 - options.max_sparsity) << "before step " << step;
  }
}

// A tenth of no matrix is a whole number, so that more weights stay than the schedule says.
TEST(Pruning, EndsWithTheProtectedWeightsWhereTheScheduleLeavesFewer) {
  dynamism::PruningOptions options = events(1);
  options.max_sparsity = options.final_sparsity = 0.9;
  RunOptions run = with(options, {3, 5});
  std::mutex mutex;
  std::int64_t kept = 0;
  std::int64_t protects = 0;
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != kSteps - 1) return {};
    const std::lock_guard lock(mutex);
    for (const auto& [id, state] : pipeline.states()) {
      const auto specs = pipeline.model()[id.index()]->parameters();
      for (std::size_t i = 0; i < specs.size(); ++i) {
        if (!specs[i].prunable) continue;
        kept += model::kept_weights(state.parameters[i].mask);
        protects += dynamism::protected_weights(0.9, specs[i].shape[0] * specs[i].shape[1]);
      }
    }
    return {};
  };
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  EXPECT_GT(kept, 0);
  EXPECT_EQ(kept, protects);
}

TEST(Pruning, MaskedAndCompressedTrainAlike) {
  const RunResult masked = run_pipeline(with(events(1), {kLayers}));
  const RunResult compressed = run_pipeline(with(events(0), {kLayers}));
  ASSERT_EQ(masked.losses.size(), compressed.losses.size());
  for (std::size_t i = 0; i < masked.losses.size(); ++i) {
    EXPECT_NEAR(masked.losses[i], compressed.losses[i], 1e-5) << "step " << i;
    EXPECT_NEAR(masked.gradient_norms[i], compressed.gradient_norms[i],
                1e-4 * masked.gradient_norms[i])
        << "step " << i;
  }
}

// Nothing is compressed in bf16, whatever the sparsity.
TEST(Pruning, InBf16MatricesStayMasked) {
  RunOptions run = with(events(0), {kLayers});
  run.precision = cost::Precision::kBf16;
  const RunResult single = run_pipeline(run);
  ASSERT_TRUE(single.status.has_value()) << single.status.error().message;
  EXPECT_EQ(single.values.at(1)[1].dim(), 2);
  const auto zeros = (single.values.at(1)[1] == 0).sum().item<std::int64_t>();
  EXPECT_GT(zeros, single.values.at(1)[1].numel() / 2);
  run.cut = {3, 2, 3};
  run.before_step = random_plans(17, 3, kMicroBatches);
  expect_same(single, run_pipeline(run), "three ranks, moving");
}

TEST(Pruning, MatricesOfAnImportedModelLoseLikeFractionsWhateverTheirStd) {
  const dynamism::PruningOptions options = events(1);
  RunOptions run = with(options, {3, 5});
  run.imported = true;
  run.begin = unlike_matrices;
  run.learning_rate = 1e-6;  // far below the smallest std
  std::mutex mutex;
  int matrices = 0;
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step == 0) return {};
    const double wanted = 1 - dynamism::sparsity_at(options, step - 1);
    const std::lock_guard lock(mutex);
    for (const auto& [id, state] : pipeline.states()) {
      for (const model::Parameter& parameter : state.parameters) {
        if (!parameter.mask.defined()) continue;
        const auto all = static_cast<double>(parameter.value.numel());
        const auto left = static_cast<double>(model::kept_weights(parameter.mask));
        // Five standard errors of a share of so many draws.
        EXPECT_NEAR(left / all, wanted, 5 * std::sqrt(wanted * (1 - wanted) / all))
            << "layer " << id.value << ", " << parameter.name << ", step " << step;
        ++matrices;
      }
    }
    return {};
  };
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  EXPECT_GT(matrices, 0);
}

// Frozen layers keep their masks and are no longer pruned.
TEST(Pruning, FrozenLayersLeaveThePool) {
  const auto sources = [](std::int64_t steps) {
    dynamism::Sources both;
    both.push_back(dynamism::make_freezing_source(
        {.schedule = {.start = 0.3, .end = 0.6, .fraction = 0.4, .every = 1}}, steps));
    both.push_back(dynamism::make_pruning_source(events()));
    return both;
  };
  RunOptions run = with(events(), {kLayers});
  run.make_sources = sources;
  const RunResult single = run_pipeline(run);
  run.cut = {2, 4, 2};
  expect_same(single, run_pipeline(run), "three ranks");
  run.before_step = random_plans(5, 3, kMicroBatches);
  expect_same(single, run_pipeline(run), "moving");
  // Frozen before the last events: denser than the rest.
  run = with(events(), {kLayers});
  const RunResult unfrozen = run_pipeline(run);
  EXPECT_GT(single.values.at(1)[1].numel(), unfrozen.values.at(1)[1].numel());
}

TEST(Pruning, OfFrozenLayersAloneChangesNothing) {
  const auto run_with = [](bool prunes) {
    RunOptions run = with(events(), {3, 5});
    run.make_sources = [prunes](std::int64_t steps) {
      dynamism::Sources sources;
      sources.push_back(dynamism::make_freezing_source(
          {.schedule = {.start = 0, .end = 0, .fraction = 1, .every = 1}}, steps));
      if (prunes) sources.push_back(dynamism::make_pruning_source(events()));
      return sources;
    };
    return run_pipeline(run);
  };
  expect_same(run_with(false), run_with(true), "with pruning");
}

// The comparisons above notice a mask that stays behind.
TEST(Pruning, AMaskThatIsWithheldShows) {
  const RunResult still = run_pipeline(with(events(1), {3, 5}));
  RunOptions run = with(events(1), {3, 5});
  run.before_step = [](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != 12) return {};
    DYNMO_TRY(pipeline.apply(plan::make_plan({5, 3}, schedule::ScheduleKind::k1F1B, 1)));
    const auto moved = pipeline.states().find(LayerId(3));
    if (moved == pipeline.states().end()) return {};
    moved->second.parameters[1].mask.fill_(0xFF);
    return {};
  };
  const RunResult moving = run_pipeline(run);
  ASSERT_TRUE(moving.status.has_value()) << moving.status.error().message;
  EXPECT_NE(still.losses, moving.losses);
}

// Every rank measures by its own clock; the expectations of all replicas follow from one rank's.
TEST(Pruning, AllRanksExpectTheSameTimesOfProducts) {
  RunOptions run = with(events(), {3, 5});
  run.replicas = 2;
  std::mutex mutex;
  struct Known {
    std::optional<cost::ProductFit> fit;
    std::vector<double> times;  // by layer
  };
  std::map<std::int64_t, std::vector<Known>> known;  // by step
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    const RankState& state = pipeline.state();
    Known mine{.fit = state.product_fit, .times = {}};
    const cost::ModelCost& costs = pipeline.profiler().known();
    for (std::size_t i = 0; i < costs.layers.size(); ++i) {
      const LayerId id(static_cast<std::int32_t>(i));
      mine.times.push_back(costs.layers[i].product_time);
      EXPECT_EQ(mine.times.back(), model::product_time(*pipeline.model()[i], shape_of(state, id),
                                                       mine.fit.value_or(cost::ProductFit())))
          << "layer " << i << " before step " << step;
      const auto own = state.layers.find(id);
      if (own == state.layers.end()) continue;
      EXPECT_EQ(shape_of(state, id), model::shape_of(own->second)) << "layer " << i;
    }
    const std::lock_guard lock(mutex);
    known[step].push_back(std::move(mine));
    return {};
  };
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  for (const auto& [step, ranks] : known) {
    ASSERT_EQ(ranks.size(), 4U);
    for (const Known& rank : ranks) {
      EXPECT_EQ(rank.fit, ranks[0].fit) << "before step " << step;
      EXPECT_EQ(rank.times, ranks[0].times) << "before step " << step;
    }
  }
  EXPECT_FALSE(known[3][0].fit) << "nothing is compressed";
  EXPECT_TRUE(known[kSteps - 1][0].fit);
}

TEST(Pruning, BytesThatThePlannerKnowsShrinkWithTheWeights) {
  RunOptions run = with(events(0.3), {3, 5});
  run.before_step = [](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != 0 && step != kSteps - 1) return {};
    const cost::ModelCost& known = pipeline.profiler().known();
    for (const auto& [id, state] : pipeline.states()) {
      const cost::LayerCost& layer = known.layers[id.index()];
      EXPECT_EQ(layer.parameter_bytes + layer.optimizer_bytes, model::tensor_bytes(state))
          << "layer " << id.value << " before step " << step;
    }
    return {};
  };
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
}

}  // namespace
}  // namespace dynmo::runtime::testing
