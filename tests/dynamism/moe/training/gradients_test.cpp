// SPDX-License-Identifier: Apache-2.0
// Gradients of a model of experts, losses of layers included, against autograd through one graph of
// the whole step, however the step is made up of ranks, replicas, rounds and micro-batches.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/training/sources.h"
#include "tests/model/experts_formula.h"
#include "tests/model/helpers.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

using at::Tensor;
using dynamism::MoeOptions;
using model::testing::plain_attention;
using model::testing::plain_norm;

using Values = std::vector<std::vector<Tensor>>;  // by layer, its parameters

constexpr std::uint64_t kGradientSeed = 7;

model::LlamaConfig without_dropout() {
  model::LlamaConfig config = small_model();
  config.dropout = 0;
  return config;
}

MoeOptions experts(double aux_loss, double z_loss) {
  MoeOptions options;
  options.experts = 4;
  options.aux_loss = aux_loss;
  options.z_loss = z_loss;
  return options;
}

RunOptions gradients_of(const MoeOptions& options) {
  RunOptions run{.steps = 0, .type = at::kDouble, .seed = kGradientSeed};
  run.make_sources = [options](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_moe_source(options));
    return sources;
  };
  model::Recipe recipe = model::decoder_recipe(model::make_llama(without_dropout()));
  EXPECT_TRUE(dynamism::shape(run.make_sources(1), recipe));
  run.layers = model::layers_of(std::move(recipe));
  return run;
}

// Far from 0 all, and routers so large that experts get uneven counts, which differ between
// micro-batches.
LayerStates spread(LayerStates states) {
  for (auto& [id, state] : states) {
    for (std::size_t i = 0; i < state.parameters.size(); ++i) {
      Tensor& value = state.parameters[i].value;
      const auto key = mix_key({kGradientSeed, static_cast<std::uint64_t>(id.value), i});
      value.add_(model::testing::random_tensor(value.sizes(), key), 0.15);
    }
  }
  return states;
}

Expected<Begin> begin_spread(const model::Model& layers, const plan::Plan& plan, Rank rank) {
  return Begin{.states = spread(
                   in_type(initial_states(layers, plan, rank, kGradientSeed, {}), at::kDouble))};
}

// Computes the loss of one micro-batch: cross entropy and the losses of all blocks.
Tensor plain_loss(const MoeOptions& o, const Values& w, const MicroBatch& one) {
  const model::LlamaConfig config = without_dropout();
  const model::RouterOptions router{
      .experts = o.experts, .top_k = o.top_k, .aux_loss = o.aux_loss, .z_loss = o.z_loss};
  Tensor x = w[0][0].index({one.tokens_BT});
  Tensor losses = at::zeros({}, at::kDouble);
  for (std::size_t i = 1; i + 1 < w.size(); i += 2) {
    x = x + plain_attention(config, w[i], x);
    const auto made =
        model::testing::experts_formula(router, w[i + 1], x, Tensor(), config.rms_epsilon);
    x = made.output;
    losses = losses + made.losses;
  }
  const Tensor scores = plain_norm(x, w.back()[0], config.rms_epsilon).matmul(w.back()[1].t());
  return losses + at::cross_entropy_loss(scores.flatten(0, 1), one.targets_BT.flatten());
}

// Computes the gradients of the mean over the micro-batches of a step: one graph.
Values plain_gradients(const MoeOptions& o, const model::Model& layers, int micro_batches) {
  at::set_num_threads(1);
  const plan::Plan whole =
      plan::make_plan(std::vector<int>{kLayers}, schedule::ScheduleKind::k1F1B);
  const Begin begin = *begin_spread(layers, whole, Rank(0));
  Values leaves;
  std::vector<Tensor> all;
  for (const auto& [id, state] : begin.states) {
    auto& own = leaves.emplace_back();
    for (const model::Parameter& p : state.parameters) {
      own.push_back(p.value.clone().set_requires_grad(true));
      all.push_back(own.back());
    }
  }
  Tensor loss = at::zeros({}, at::kDouble);
  for (int id = 0; id < micro_batches; ++id) {
    loss = loss + plain_loss(o, leaves, batch(small_model(), kGradientSeed, 0, MicroBatchId(id)));
  }
  const auto gradients = torch::autograd::grad({loss / micro_batches}, all);
  auto next = gradients.begin();
  for (auto& own : leaves) {
    for (Tensor& leaf : own) leaf = *next++;
  }
  return leaves;
}

// The largest relative difference of the gradient of a parameter of that name; "": of any.
double distance(const Values& a, const Values& b, const model::Model& layers,
                const std::string& name = {}) {
  double largest = 0;
  for (std::size_t layer = 0; layer < a.size(); ++layer) {
    const auto specs = layers[layer]->parameters();
    for (std::size_t i = 0; i < a[layer].size(); ++i) {
      if (!name.empty() && specs[i].name != name) continue;
      const double norm = b[layer][i].norm().item<double>();
      EXPECT_GT(norm, 1e-6) << specs[i].name << ": a gradient to compare";
      largest = std::max(largest, (a[layer][i] - b[layer][i]).norm().item<double>() / norm);
    }
  }
  return largest;
}

Values gradients(const RunOptions& run) {
  const RunResult result = run_pipeline(run);
  EXPECT_TRUE(result.status) << result.status.error().message;
  EXPECT_EQ(result.different, 0) << "replicas";
  Values values;
  for (const auto& [layer, own] : result.gradient_values) values.push_back(own);
  EXPECT_EQ(values.size(), static_cast<std::size_t>(kLayers));
  return values;
}

// Ranks of a pipeline x its schedules x replicas x rounds x micro-batches of a round.
TEST(MoeGradients, AreThoseOfOneGraphOfTheWholeStepHoweverItIsMadeUp) {
  const MoeOptions options = experts(0.2, 0.05);
  RunOptions run = gradients_of(options);
  run.begin = begin_spread;
  Rng rng(kGradientSeed);
  int compared = 0;
  for (const int step_micro_batches : {6, 12}) {
    const Values plain = plain_gradients(options, run.layers, step_micro_batches);
    for (const int ranks : {1, 2, 3}) {
      for (const schedule::ScheduleKind kind : kKinds) {
        for (const int replicas : {1, 2}) {
          for (const int rounds : {1, 2}) {
            if (step_micro_batches % (ranks * replicas * rounds) != 0) continue;
            run.replicas = replicas;
            run.accumulation = rounds;
            run.micro_batches = step_micro_batches / (replicas * rounds);
            run.plan = random_plan(rng, kind, kLayers, ranks, run.micro_batches);
            run.recompute = compared % 3 == 0 ? plan::Recompute::kWhole : plan::Recompute::kNone;
            const Values ours = gradients(run);
            ASSERT_LT(distance(ours, plain, run.layers), 1e-9)
                << ranks << " ranks, " << schedule::name(kind) << ", " << replicas << " replicas, "
                << rounds << " rounds of " << run.micro_batches << ", seed " << kGradientSeed;
            ++compared;
          }
        }
      }
    }
  }
  EXPECT_EQ(compared, 108);
}

// Or the comparison above would not see them.
TEST(MoeGradients, OfRoutersAreChangedByBothLosses) {
  const char* router = "block_sparse_moe.gate.weight";
  const model::Model layers = gradients_of(experts(0.2, 0.05)).layers;
  const Values both = plain_gradients(experts(0.2, 0.05), layers, 6);
  EXPECT_GT(distance(plain_gradients(experts(0, 0.05), layers, 6), both, layers, router), 0.01);
  EXPECT_GT(distance(plain_gradients(experts(0.4, 0.05), layers, 6), both, layers, router), 0.01);
  EXPECT_GT(distance(plain_gradients(experts(0.2, 0), layers, 6), both, layers, router), 0.01);
}

}  // namespace
}  // namespace dynmo::runtime::testing
