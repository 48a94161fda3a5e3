// SPDX-License-Identifier: Apache-2.0
// Every source exists twice, from one table of keys: what a training does, and the load model of
// the same table. A small training and its twin agree on what changes in which step, and on what is
// left of each layer. No clock decides: times of the twin are compared with what the run expects of
// them, product_time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/dynamism/load_log.h"
#include "dynmo/dynamism/pruning/load.h"
#include "dynmo/dynamism/registry.h"
#include "dynmo/model/pruned.h"
#include "dynmo/train/traces.h"
#include "tests/dynamism/shapes.h"
#include "tests/runtime/pipeline_fixture.h"
#include "tests/support/temp_folder.h"

namespace dynmo::train {
namespace {

using runtime::LayerStates;
using runtime::Pipeline;

constexpr int kTwinSteps = 24;
constexpr int kTwinLayers = 8;

// Large enough that the weights of a layer are many.
model::LlamaConfig twin_model() {
  model::LlamaConfig config = runtime::testing::small_model();
  config.shape.hidden = 64;
  config.shape.intermediate = 96;
  config.dropout = 0;
  return config;
}

// A table of keys that both read: a training its keys, a scenario its own besides.
dynamism::SourceOptions options_of(const std::string& training, const std::string& scenario) {
  dynamism::SourceOptions sources;
  EXPECT_TRUE(apply_toml(sources.training_keys(), training, "training"));
  EXPECT_TRUE(apply_toml(sources.scenario_keys(), scenario, "scenario"));
  return sources;
}

std::unique_ptr<dynamism::LoadModel> twin_of(std::string_view source,
                                             const dynamism::SourceOptions& sources) {
  cost::TransformerShape shape =
      cost::transformer_shape(twin_model().shape, cost::Architecture::kLlama);
  shape.micro_batch_size = 2;
  auto load = dynamism::make_load_model(source, {.inputs = {.shape = shape,
                                                            .device = dynamism::arithmetic_device(),
                                                            .steps = kTwinSteps,
                                                            .micro_batches = 4},
                                                 .sources = sources});
  EXPECT_TRUE(load) << (load ? "" : load.error().message);
  return std::move(*load);
}

// Looks at the states of a rank before a step.
using Look = std::function<void(const model::Model&, const LayerStates&, std::int64_t step)>;

// Returns the load that the training wrote down, step by step.
std::unique_ptr<dynamism::LoadModel> trained(const dynamism::SourceOptions& sources,
                                             double learning_rate, const Look& look = {}) {
  const TempFolder folder;
  const std::filesystem::path trace = folder.path() / "load-trace.jsonl";
  const model::LlamaConfig config = twin_model();
  const model::Model layers = model::make_llama(config);
  runtime::PipelineOptions options =
      runtime::testing::pipeline_options(config, {.steps = kTwinSteps});
  options.learning_rate.peak = learning_rate;
  options.learning_rate.minimum = 0;
  options.make_sources = dynamism::make_sources(sources);
  options.balancing = runtime::Balancing::kNever;
  const plan::Plan plan = plan::make_plan({3, 5}, schedule::ScheduleKind::k1F1B);
  std::mutex mutex;
  const auto done =
      transport::run_ranks(plan.ranks, [&](transport::Transport& transport) -> Expected<void> {
        at::set_num_threads(1);
        const Rank rank(transport.rank().value);
        const auto batches = [&](std::int64_t step, MicroBatchId id) {
          return runtime::testing::batch(config, options.seed, step, id);
        };
        const auto states = [&] {
          runtime::RankState state{plan, runtime::initial_states(layers, plan, rank, options.seed)};
          state.product_fit = sources.get<dynamism::PruningOptions>().product_fit;  // by no clock
          return state;
        };
        Pipeline measuring(transport, layers, options, states());
        DYNMO_TRY(measuring.measure(batches, 4));
        Pipeline pipeline(transport, layers, options, states());
        DYNMO_TRY(pipeline.use(measuring.profiler()));
        DYNMO_ASSIGN(const auto writer,
                     observe::LoadTraceWriter::open(rank == Rank(0) ? trace : "/dev/null", 1));
        for (std::int64_t step = 0; step < kTwinSteps; ++step) {
          if (look) {
            const std::lock_guard lock(mutex);
            look(layers, pipeline.states(), step);
          }
          DYNMO_ASSIGN(const runtime::StepReport report, pipeline.step(batches));
          writer->add(load_trace_step(report, pipeline));
        }
        return writer->close();
      });
  EXPECT_TRUE(done) << (done ? "" : done.error().message);
  auto load = dynamism::read_trace(trace);
  EXPECT_TRUE(load) << (load ? "" : load.error().message);
  return std::move(*load);
}

TEST(Twin, FreezesTheSameLayersInTheSameSteps) {
  const auto sources = options_of(
      "[freezing]\nenabled = true\nstart = 0.2\nend = 0.8\nfraction = 0.6\nevery = 3\n", "");
  const auto run = trained(sources, 1e-3);
  const auto twin = twin_of("freezing", sources);
  int frozen = 0;
  for (std::int64_t step = 0; step < kTwinSteps; ++step) {
    EXPECT_EQ(twin->announced_at(step), run->announced_at(step)) << "step " << step;
    const cost::ModelCost theirs = twin->at(step);
    const cost::ModelCost ours = run->at(step);
    ASSERT_EQ(theirs.size(), ours.size());
    frozen = 0;
    for (std::size_t i = 0; i < ours.layers.size(); ++i) {
      const cost::LayerCost& layer = ours.layers[i];
      ASSERT_EQ(theirs.layers[i].frozen, layer.frozen) << "layer " << i << " in step " << step;
      EXPECT_EQ(theirs.layers[i].optimizer_bytes == Bytes{0}, layer.optimizer_bytes == Bytes{0});
      if (!layer.frozen) continue;
      ++frozen;
      EXPECT_EQ(layer.backward_input_s + layer.backward_weight_s + layer.update_s, 0);
    }
  }
  EXPECT_EQ(frozen, 4);
}

constexpr const char* kPruned =
    "[pruning]\nenabled = true\nstart = 4\nend = 16\nevery = 4\nsparse_above = 0.6\n";

std::int64_t weights_of(const model::ParameterSpec& spec) { return spec.shape[0] * spec.shape[1]; }

// Weights that have hardly moved are what they were drawn as, of one std a matrix by which they are
// compared: depth_ratio 1 and no spread in the words of a scenario. A layer then keeps its share
// but for chance: 12,288 weights or more of which a tenth stays, one std of which is 2.7 %.
TEST(Twin, PrunesToTheSameDensitiesInTheSameSteps) {
  const auto sources = options_of(kPruned, "[pruning]\ndepth_ratio = 1\nmatrix_spread = 0\n");
  const auto& options = sources.get<dynamism::PruningOptions>();
  std::vector<std::int64_t> kept(kTwinSteps);
  std::int64_t weights = 0;
  const auto run = trained(
      sources, 1e-5, [&](const model::Model& layers, const LayerStates& states, std::int64_t step) {
        for (const auto& [id, state] : states) {
          const auto specs = layers[id.index()]->parameters();
          for (std::size_t p = 0; p < specs.size(); ++p) {
            if (!specs[p].prunable) continue;
            const at::Tensor& mask = state.parameters[p].mask;
            kept[static_cast<std::size_t>(step)] +=
                mask.defined() ? model::kept_weights(mask) : weights_of(specs[p]);
            weights += step == 0 ? weights_of(specs[p]) : 0;
          }
        }
      });
  const auto twin = twin_of("pruning", sources);
  const cost::ModelCost dense = twin->at(0);
  for (std::int64_t step = 0; step < kTwinSteps; ++step) {
    EXPECT_EQ(twin->announced_at(step), run->announced_at(step)) << "step " << step;
    // The states before a step are those after the events of the steps before.
    const double sparsity = step == 0 ? 0 : dynamism::sparsity_at(options, step - 1);
    EXPECT_EQ(kept[static_cast<std::size_t>(step)],
              std::llround((1 - sparsity) * static_cast<double>(weights)))
        << "step " << step;
    const cost::ModelCost theirs = twin->at(step);
    const cost::ModelCost ours = run->at(step);
    ASSERT_EQ(theirs.size(), ours.size());
    for (std::size_t i = 0; i < ours.layers.size(); ++i) {
      const cost::LayerCost& layer = ours.layers[i];
      EXPECT_NEAR(theirs.layers[i].product_time, layer.product_time, 0.1 * layer.product_time)
          << "layer " << i << " in step " << step;
      // Nothing but products, so the load model's time goes by them.
      if (dense.layers[i].product_time == theirs.layers[i].product_time) continue;
      EXPECT_NEAR(theirs.layers[i].backward_weight_s / dense.layers[i].backward_weight_s,
                  layer.product_time, 0.2 * layer.product_time)
          << "layer " << i << " in step " << step;
    }
  }
  EXPECT_LT(run->at(kTwinSteps - 1).layers[1].product_time, 0.4);
}

// The weights have been trained, and their stds differ by then: the model that the load draws its
// stds for holds with those of the run, layer by layer, within 0.02.
TEST(Twin, DensitiesFollowFromTheStdsOfTheRunsOwnWeights) {
  const auto sources =
      options_of("[pruning]\nenabled = true\nstart = 20\nend = 20\nfinal_sparsity = 0.8\n", "");
  std::vector<dynamism::WeightGroup> groups(kTwinLayers);
  std::vector<double> left(kTwinLayers);
  trained(sources, 1e-2,
          [&](const model::Model& layers, const LayerStates& states, std::int64_t step) {
            if (step != 20 && step != 21) return;
            for (const auto& [id, state] : states) {
              const auto specs = layers[id.index()]->parameters();
              double squares = 0;
              for (std::size_t p = 0; p < specs.size(); ++p) {
                if (!specs[p].prunable) continue;
                const model::Parameter& parameter = state.parameters[p];
                left[id.index()] +=
                    step == 21 ? static_cast<double>(model::kept_weights(parameter.mask)) : 0;
                if (step == 21) continue;
                const double norm = parameter.value.norm().item<double>() / specs[p].init_std;
                squares += norm * norm;
                groups[id.index()].weights += static_cast<double>(weights_of(specs[p]));
              }
              if (squares > 0) {
                groups[id.index()].std = std::sqrt(squares / groups[id.index()].weights);
              }
            }
          });
  const std::vector<double> densities = dynamism::global_densities(groups, 0.8, 0.02);
  double widest = 0;
  for (std::size_t i = 1; i + 1 < kTwinLayers; ++i) {
    const double density = left[i] / groups[i].weights;
    EXPECT_NEAR(densities[i], density, 0.02) << "layer " << i << ", std " << groups[i].std;
    widest = std::max(widest, std::abs(density - 0.2));
  }
  EXPECT_GT(widest, 0.01) << "layers that differ";
}

}  // namespace
}  // namespace dynmo::train
