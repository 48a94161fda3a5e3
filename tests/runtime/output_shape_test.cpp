// SPDX-License-Identifier: Apache-2.0
// Boundaries whose size changes from step to step: messages of emulated ranks have the bytes that
// their layers' costs say, wherever the layers are, and plans know them.
#include "dynmo/model/output_shape.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <tuple>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/model/emulated/layer.h"
#include "dynmo/transport/traffic.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

constexpr int kReplayed = 9;  // layers

// The boundaries have another size behind every layer and in every step, now and then nothing.
cost::ModelCost replayed_costs(std::uint64_t seed, std::int64_t step) {
  cost::ModelCost costs;
  for (int i = 0; i < kReplayed; ++i) {
    Rng rng(mix_key({seed, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(i)}));
    cost::LayerCost layer;
    layer.name = fmt::format("layer{}", i);
    layer.forward_s = layer.backward_input_s = layer.backward_weight_s = 1e-6;
    layer.parameter_bytes = Bytes{256};
    const std::uint64_t bytes = rng.below(5000);
    layer.boundary_bytes = Bytes{rng.below(6) == 0 ? 0 : static_cast<std::int64_t>(bytes)};
    costs.layers.push_back(layer);
  }
  return costs;
}

Bytes sent_behind(const cost::ModelCost& costs, int layer) {
  const Bytes given = costs.layers[static_cast<std::size_t>(layer)].boundary_bytes;
  return Bytes{std::max<std::int64_t>(4, given.value / 4 * 4)};
}

// Bytes by sender, receiver and purpose.
using SentBytes = std::map<std::tuple<int, int, Purpose>, Bytes>;

// Adds what ranks send to each other in a step over the boundaries of a plan.
void add_sent(const plan::Plan& plan, const cost::ModelCost& costs, int micro_batches,
              SentBytes& traffic) {
  for (std::size_t s = 0; s + 1 < plan.stages.size(); ++s) {
    const int from = plan.stages[s].rank.value;
    const int to = plan.stages[s + 1].rank.value;
    if (from == to) continue;
    const Bytes each = sent_behind(costs, plan.stages[s].layers.end() - 1);
    traffic[{from, to, Purpose::kActivation}] += each * micro_batches;
    traffic[{to, from, Purpose::kGradient}] += each * micro_batches;
  }
}

TEST(OutputShapes, OfEmulatedLayersAreTheBytesThatAreSentAndPlannedWith) {
  constexpr int kRanks = 3;
  constexpr int kMicroBatches = 6;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const auto costs = [seed](std::int64_t step) { return replayed_costs(seed, step); };
    const model::Model layers = model::make_emulated({.costs = costs}).value();
    RunOptions run{.steps = 18, .micro_batches = kMicroBatches};
    PipelineOptions options = pipeline_options(small_model(), run);
    options.boundary_shape = model::emulated_boundary(costs(0));
    if (seed % 2 == 1) options.recompute = plan::Recompute::kWhole;
    const plan::Plan plan = plan::make_plan({2, 4, 3}, schedule::ScheduleKind::k1F1B);
    const auto move = random_plans(seed, kRanks, kMicroBatches);
    const auto status =
        transport::run_ranks(kRanks, [&](transport::Transport& inner) -> Expected<void> {
          at::set_num_threads(1);
          transport::CountingTransport counting(inner);
          const Rank rank(inner.rank().value);
          Pipeline pipeline(counting, layers, options,
                            {plan, initial_states(layers, plan, rank, 1)});
          SentBytes expected;
          for (std::int64_t step = 0; step < run.steps; ++step) {
            DYNMO_TRY(move(pipeline, step));
            add_sent(pipeline.plan(), costs(step), kMicroBatches, expected);
            DYNMO_TRY(pipeline.step(
                [&](std::int64_t s, MicroBatchId id) { return batch(small_model(), 1, s, id); }));
            const cost::ModelCost known = *pipeline.costs();
            for (int i = 0; i + 1 < kReplayed; ++i) {
              EXPECT_EQ(known.layers[static_cast<std::size_t>(i)].boundary_bytes,
                        sent_behind(costs(step), i))
                  << "seed " << seed << ", step " << step << ", layer " << i;
            }
          }
          for (int to = 0; to < kRanks; ++to) {
            for (const auto purpose : {Purpose::kActivation, Purpose::kGradient}) {
              EXPECT_EQ(counting.sent(transport::Member(to), purpose).bytes,
                        (expected[{rank.value, to, purpose}]))
                  << "seed " << seed << ", " << rank.value << " to " << to;
            }
          }
          return {};
        });
    ASSERT_TRUE(status) << "seed " << seed << ": " << status.error().message;
  }
}

TEST(OutputShapes, OfOtherModelsAreNone) {
  EXPECT_TRUE(
      model::output_shapes(model::make_llama(small_model()), 3, {2, 12, 32}, at::kFloat).empty());
}

}  // namespace
}  // namespace dynmo::runtime::testing
