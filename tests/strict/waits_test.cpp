// SPDX-License-Identifier: Apache-2.0
// Counts of the host's waits for the device in a step. They may only fall.
#include <gtest/gtest.h>

#include <barrier>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/dynamism/training/sources.h"
#include "tests/runtime/blinking_source.h"
#include "tests/runtime/pipeline_fixture.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::runtime::testing {
namespace {

using Waits = std::map<std::string, std::int64_t>;

// Returns the waits of all ranks in each step but the first, which also prepares the run.
std::vector<Waits> waits_by_step(RunOptions run) {
  run.staging.device = strict::open(0);
  const auto ranks = static_cast<std::ptrdiff_t>(run.cut.size()) * run.replicas;
  std::vector<Waits> all;
  std::barrier all_done(ranks, [&all]() noexcept { all.push_back(strict::take_waits()); });
  run.before_step = [&](Pipeline& /*pipeline*/, std::int64_t /*step*/) -> Expected<void> {
    all_done.arrive_and_wait();
    return {};
  };
  const RunResult result = run_pipeline(run);
  EXPECT_TRUE(result.status) << result.status.error().message;
  EXPECT_EQ(std::ssize(all), run.steps);
  all.erase(all.begin(), all.begin() + 2);
  return all;
}

// Makes it a run of kLayers layers, of which two are routed.
void route(RunOptions& run) {
  run.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_mixture_of_depths_source({.capacity = 0.25}));
    return sources;
  };
  model::LlamaConfig config = small_model();
  config.shape.blocks = 4;
  run.layers = shaped(model::make_llama(config), run.make_sources);
}

// Removes weights before the first step. Later events would wait, between two steps.
void prune(RunOptions& run, dynamism::PruningForm form) {
  run.make_sources = [form](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_pruning_source({.start = 0,
                                                     .end = 0,
                                                     .every = 1,
                                                     .initial_sparsity = 0.5,
                                                     .final_sparsity = 0.5,
                                                     .form = form}));
    return sources;
  };
}

// Makes it a run with experts.
void give_experts(RunOptions& run, double capacity_factor) {
  run.make_sources = [capacity_factor](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_moe_source({.experts = 4,
                                                 .router = dynamism::MoeRouter::kBias,
                                                 .expert_ranks = 1,
                                                 .capacity_factor = capacity_factor}));
    return sources;
  };
  run.layers = shaped(model::make_llama(small_model()), run.make_sources);
}

// Makes it a run with attention within buckets, of heads of `head_size`.
void hash_run(RunOptions& run, std::int64_t head_size = 8) {
  run.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_sparse_attention_source({.buckets = 4}));
    return sources;
  };
  model::LlamaConfig config = small_model();
  config.shape.heads = config.shape.hidden / head_size;
  run.layers = shaped(model::make_llama(config), run.make_sources);
}

TEST(WaitsOfAStep, AreOneOnOneRank) {
  for (const std::string_view technique :
       {"dense", "freezing", "depths", "pruning", "units", "experts", "capacity", "hash"}) {
    for (const auto precision : {cost::Precision::kFp32, cost::Precision::kBf16}) {
      RunOptions run{.steps = 12, .cut = {kLayers}};
      run.precision = precision;
      if (technique == "freezing") run.freezing = freezing();
      if (technique == "depths") route(run);
      if (technique == "pruning") prune(run, dynamism::PruningForm::kWeights);
      if (technique == "units") prune(run, dynamism::PruningForm::kUnits);
      if (technique == "experts") give_experts(run, /*capacity_factor=*/0);
      if (technique == "capacity") give_experts(run, /*capacity_factor=*/0.9);
      if (technique == "hash") hash_run(run);
      for (const Waits& waits : waits_by_step(run)) {
        EXPECT_EQ(waits, (Waits{{"synchronize stream", 1}})) << technique;
      }
    }
  }
}

// The number of rows that leave decides shapes. While none can leave, nobody waits for it.
TEST(WaitsOfAStep, AreOneMoreAnExitAndMicroBatch) {
  RunOptions run{.steps = 8, .cut = {kLayers}};
  run.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_early_exit_source(
        {.survivors = 0.3, .exit_every = 1, .warm_up = 4, .ramp_steps = 1}));
    return sources;
  };
  run.layers = shaped(model::make_llama(small_model()), run.make_sources);
  std::size_t step = 0;
  for (const Waits& waits : waits_by_step(run)) {
    Waits expected = {{"synchronize stream", 1}};
    if (++step > 4) expected["aten::_local_scalar_dense"] = 2 * run.micro_batches;
    EXPECT_EQ(waits, expected) << "step " << step;
  }
}

// Depths and experts in one layer, and a step on each of two ranks.
TEST(WaitsOfAStep, AreOneWithExpertsInRoutedBlocks) {
  RunOptions run{.steps = 6};
  run.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_moe_source({.experts = 4, .expert_ranks = 1}));
    sources.push_back(dynamism::make_mixture_of_depths_source({.capacity = 0.25}));
    return sources;
  };
  run.layers = shaped(model::make_llama(small_model()), run.make_sources);
  run.cut = {static_cast<int>(run.layers.size())};
  for (const Waits& waits : waits_by_step(run)) {
    EXPECT_EQ(waits, (Waits{{"synchronize stream", 1}}));
  }
}

// The host assigns tokens to experts by their scores.
TEST(WaitsOfAStep, AreOneMoreALayerOfAssignedExpertsAndMicroBatch) {
  RunOptions run{.steps = 6, .cut = {kLayers}};
  run.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_moe_source(
        {.experts = 4, .router = dynamism::MoeRouter::kBalanced, .expert_ranks = 1}));
    return sources;
  };
  run.layers = shaped(model::make_llama(small_model()), run.make_sources);
  const std::int64_t layers = small_model().shape.blocks;
  for (const Waits& waits : waits_by_step(run)) {
    EXPECT_EQ(waits,
              (Waits{{"aten::copy_", layers * run.micro_batches}, {"synchronize stream", 1}}));
  }
}

// No fused operation takes heads of 4 elements. Then the longest bucket decides shapes.
TEST(WaitsOfAStep, AreOneMoreALayerOfHashesWithOddHeadsAndMicroBatch) {
  RunOptions run{.steps = 6, .cut = {kLayers}};
  hash_run(run, /*head_size=*/4);
  const std::int64_t layers = small_model().shape.blocks;
  for (const Waits& waits : waits_by_step(run)) {
    EXPECT_EQ(waits, (Waits{{"aten::_local_scalar_dense", layers * run.micro_batches},
                            {"synchronize stream", 1}}));
  }
}

// Without channels each message to another stage passes through host memory, and its sender waits
// for the copy alone.
TEST(WaitsOfAStep, AreOneARankAndOneAMessageThroughHostMemory) {
  const RunOptions run{.steps = 6, .cut = {3, 2, 3}};
  const std::int64_t messages = 2 * 2 * run.micro_batches;
  for (const Waits& waits : waits_by_step(run)) {
    EXPECT_EQ(waits, (Waits{{"synchronize event", messages}, {"synchronize stream", 3}}));
  }
}

// The gradients of a layer are copied to host memory with one wait.
TEST(WaitsOfAStep, AreOneMoreALayerAndReplica) {
  RunOptions run{.steps = 6, .cut = {kLayers}};
  run.replicas = 2;
  const std::int64_t waits_of_all = 2 * (kLayers + 2);
  for (const Waits& waits : waits_by_step(run)) {
    EXPECT_EQ(waits, (Waits{{"synchronize stream", waits_of_all}}));
  }
}

// Each round is waited for.
TEST(WaitsOfAStep, AreOneARoundOfAccumulation) {
  RunOptions run{.steps = 6, .cut = {kLayers}};
  run.accumulation = 2;
  for (const Waits& waits : waits_by_step(run)) {
    EXPECT_EQ(waits, (Waits{{"synchronize stream", 2}}));
  }
}

}  // namespace
}  // namespace dynmo::runtime::testing
