// SPDX-License-Identifier: Apache-2.0
// Pruning of whole units in real training. Bits are the same under any layout. The schedule says
// how many units stay, and layers become smaller dense ones.
#include "dynmo/model/units.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "dynmo/dynamism/pruning/load.h"
#include "dynmo/dynamism/pruning/select.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/pruned.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

constexpr int kUnitSteps = 18;

dynamism::PruningOptions unit_events(std::int64_t multiple = 1) {
  dynamism::PruningOptions options;
  options.start = 2;
  options.end = 14;
  options.every = 4;
  options.final_sparsity = 0.6;
  options.form = dynamism::PruningForm::kUnits;
  options.unit_multiple = multiple;
  return options;
}

RunOptions of_units(const dynamism::PruningOptions& options, std::vector<int> cut) {
  RunOptions run{.steps = kUnitSteps, .micro_batches = 6, .cut = std::move(cut)};
  run.make_sources = [options](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_pruning_source(options));
    return sources;
  };
  return run;
}

// Four query heads in two groups, with biases, or GPT-2.
model::Model other_model(std::string_view kind) {
  model::LlamaConfig llama = small_model();
  if (kind == "grouped") {
    llama.shape.heads = 4;
    llama.shape.kv_heads = 2;
    llama.qkv_bias = true;
    return model::make_llama(llama);
  }
  model::Gpt2Config gpt2;
  gpt2.shape = llama.shape;
  gpt2.shape.kv_heads = 0;
  gpt2.shape.positions = gpt2.shape.sequence;
  gpt2.tied_embeddings = false;
  return model::make_decoder(gpt2);
}

using LookAtLayer = std::function<void(std::int64_t step, const model::LayerState& state,
                                       const std::vector<model::ParameterSpec>& specs)>;
// Looks at all layers of all ranks before each step, one at a time.
RunResult looked_at(RunOptions run, const LookAtLayer& look) {
  std::mutex mutex;
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    const std::lock_guard lock(mutex);
    for (const auto& [id, state] : pipeline.states()) {
      look(step, state, pipeline.model()[id.index()]->parameters());
    }
    return {};
  };
  return run_pipeline(run);
}

class Units : public ::testing::TestWithParam<std::string_view> {};

TEST_P(Units, GiveTheSameBitsOnOneToThreeRanksAndWhileLayersMove) {
  RunOptions run = of_units(unit_events(), {kLayers});
  if (GetParam() == "bf16") run.precision = cost::Precision::kBf16;
  if (GetParam() == "grouped" || GetParam() == "gpt2") run.layers = other_model(GetParam());
  RunOptions dense = run;
  dense.make_sources = {};
  const RunResult single = run_pipeline(run);
  ASSERT_TRUE(single.status.has_value()) << single.status.error().message;
  EXPECT_NE(single.losses, run_pipeline(dense).losses) << "the source does something";
  run.cut = {3, 5};
  expect_same(single, run_pipeline(run), "two ranks");
  run.cut = {3, 2, 3};
  run.before_step = random_plans(43, 3, run.micro_batches);
  expect_same(single, run_pipeline(run), "three ranks, moving");
}

INSTANTIATE_TEST_SUITE_P(Models, Units, ::testing::Values("fp32", "bf16", "grouped", "gpt2"),
                         [](const auto& test) { return std::string(test.param); });

TEST(UnitPruning, ReplicasAndRecomputationChangeNoBit) {
  RunOptions run = of_units(unit_events(), {kLayers});
  run.replicas = 2;
  const RunResult whole = run_pipeline(run);
  run.cut = {3, 5};
  expect_same(whole, run_pipeline(run), "two ranks a replica");
  run.recompute = plan::Recompute::kWhole;
  expect_same(whole, run_pipeline(run), "recomputed");
}

// Frozen layers keep their units and leave the pool.
TEST(UnitPruning, SparesFrozenLayers) {
  RunOptions run = of_units(unit_events(), {kLayers});
  run.make_sources = [](std::int64_t steps) {
    dynamism::Sources both;
    both.push_back(dynamism::make_freezing_source(
        {.schedule = {.start = 0.3, .end = 0.6, .fraction = 0.4, .every = 1}}, steps));
    both.push_back(dynamism::make_pruning_source(unit_events()));
    return both;
  };
  const RunResult single = run_pipeline(run);
  run.cut = {2, 4, 2};
  run.before_step = random_plans(5, 3, run.micro_batches);
  expect_same(single, run_pipeline(run), "three ranks, moving");
  const RunResult unfrozen = run_pipeline(of_units(unit_events(), {kLayers}));
  EXPECT_GT(single.values.at(2)[1].numel(), unfrozen.values.at(2)[1].numel());
}

// Every tensor of a layer has the shape of a smaller layer, and all parts of a unit go together.
TEST(UnitPruning, LeavesAsManyUnitsAsTheScheduleSays) {
  const dynamism::PruningOptions options = unit_events();
  std::map<std::int64_t, std::map<model::UnitKind, std::int64_t>> left;  // by step
  std::map<model::UnitKind, std::int64_t> all;
  std::map<model::UnitKind, std::int64_t> least;
  const RunResult result =
      looked_at(of_units(options, {3, 5}), [&](std::int64_t step, const model::LayerState& state,
                                               const std::vector<model::ParameterSpec>& specs) {
        for (const model::UnitSet& set : model::unit_sets(specs)) {
          const std::size_t first = set.parameters.front();
          const auto units = model::units_left(state.parameters[first], specs[first]);
          left[step][set.kind] += std::ssize(units);
          if (step == 0) {
            all[set.kind] += set.count;
            least[set.kind] += dynamism::protected_weights(options.max_sparsity, set.count);
          }
          EXPECT_GE(units.size(), 1U);
          for (const std::size_t p : set.parameters) {
            const model::Parameter& parameter = state.parameters[p];
            EXPECT_EQ(parameter.by_units, parameter.mask.defined());
            EXPECT_EQ(model::units_left(parameter, specs[p]), units) << specs[p].name;
            const std::vector<std::int64_t> shape = model::shape_with(specs[p], std::ssize(units));
            for (const at::Tensor* tensor : {&parameter.value, &parameter.gradient,
                                             &parameter.first_moment, &parameter.second_moment}) {
              EXPECT_EQ(tensor->sizes().vec(), shape) << specs[p].name;
            }
          }
        }
      });
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  for (int step = 1; step < kUnitSteps; ++step) {
    const double sparsity = dynamism::sparsity_at(options, step - 1);
    for (const auto& [kind, count] : all) {
      EXPECT_EQ(left[step][kind], std::max(dynamism::weights_left(sparsity, count), least[kind]))
          << "before step " << step;
    }
  }
  EXPECT_LT(left[kUnitSteps - 1][model::UnitKind::kHidden], all[model::UnitKind::kHidden] / 2);
}

TEST(UnitPruning, RoundsHiddenUnitsUpToAMultiple) {
  std::int64_t layers = 0;
  const RunResult result = looked_at(
      of_units(unit_events(8), {3, 5}), [&](std::int64_t step, const model::LayerState& state,
                                            const std::vector<model::ParameterSpec>& specs) {
        for (const model::UnitSet& set : model::unit_sets(specs)) {
          if (set.kind != model::UnitKind::kHidden || step == 0) continue;
          const std::size_t first = set.parameters.front();
          const std::int64_t units =
              std::ssize(model::units_left(state.parameters[first], specs[first]));
          EXPECT_TRUE(units % 8 == 0 || units == set.count) << units;
          layers += units < set.count ? 1 : 0;
        }
      });
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  EXPECT_GT(layers, 0);
}

// The units that stay are those of the largest sizes, computed here by libtorch's own norms.
TEST(UnitPruning, KeepsTheLargestUnits) {
  dynamism::PruningOptions options = unit_events();
  options.start = options.end = 6;
  std::map<int, at::Tensor> sizes;  // of MLPs, by layer
  std::map<int, std::vector<std::int32_t>> stay;
  const auto scaled = [](const at::Tensor& value, const model::ParameterSpec& spec, int axis) {
    return value.to(at::kDouble).div(spec.init_std).square().sum(axis);
  };
  const RunResult result =
      looked_at(of_units(options, {kLayers}), [&](std::int64_t step, const model::LayerState& state,
                                                  const std::vector<model::ParameterSpec>& specs) {
        if (specs.size() != 4 || specs[1].name != "mlp.gate_proj.weight") return;
        const auto& p = state.parameters;
        if (step == 6) {
          sizes[state.id.value] = scaled(p[1].value, specs[1], 1) +
                                  scaled(p[2].value, specs[2], 1) + scaled(p[3].value, specs[3], 0);
        }
        if (step == 7) stay[state.id.value] = model::units_left(p[3], specs[3]);
      });
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  ASSERT_EQ(stay.size(), 3U);
  double smallest_left = 1e9;
  double largest_removed = 0;
  for (const auto& [layer, units] : stay) {
    for (std::int32_t u = 0; u < sizes.at(layer).size(0); ++u) {
      const double size = sizes.at(layer)[u].item<double>();
      if (std::ranges::binary_search(units, u)) smallest_left = std::min(smallest_left, size);
      if (!std::ranges::binary_search(units, u)) largest_removed = std::max(largest_removed, size);
    }
  }
  EXPECT_GE(smallest_left, largest_removed * (1 - 1e-6));
}

TEST(UnitPruning, CostsThatThePlannerKnowsFollowTheUnits) {
  RunOptions run = of_units(unit_events(), {3, 5});
  run.before_step = [](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != 0 && step != kUnitSteps - 1) return {};
    const cost::ModelCost& known = pipeline.profiler().known();
    EXPECT_FALSE(pipeline.state().product_fit) << "dense products need no measure";
    for (const auto& [id, state] : pipeline.states()) {
      const cost::LayerCost& layer = known.layers[id.index()];
      EXPECT_EQ(layer.parameter_bytes + layer.optimizer_bytes, model::tensor_bytes(state))
          << "layer " << id.value << " before step " << step;
      double weights = 0;
      double kept = 0;
      const auto specs = pipeline.model()[id.index()]->parameters();
      for (std::size_t i = 0; i < specs.size(); ++i) {
        if (!specs[i].prunable) continue;
        weights += static_cast<double>(specs[i].shape[0] * specs[i].shape[1]);
        kept += static_cast<double>(state.parameters[i].value.numel());
      }
      EXPECT_DOUBLE_EQ(layer.product_time, weights > 0 ? kept / weights : 1);
    }
    return {};
  };
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
}

}  // namespace
}  // namespace dynmo::runtime::testing
