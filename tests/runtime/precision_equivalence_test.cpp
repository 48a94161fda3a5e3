// SPDX-License-Identifier: Apache-2.0
// What equivalence_test.cpp holds in fp32, in bf16: ranks, cuts, schedules and moves change no bit.
#include <gtest/gtest.h>

#include "dynmo/core/rng.h"
#include "pipeline_fixture.h"
#include "tests/model/stash_bytes.h"

namespace dynmo::runtime::testing {
namespace {

RunOptions bf16(RunOptions options) {
  options.precision = cost::Precision::kBf16;
  return options;
}

TEST(Bf16Equivalence, AnyRanksCutAndScheduleEqualOneRankBitForBit) {
  constexpr std::uint64_t kSeed = 41;
  for (const int ranks : {2, 3}) {
    const int micro_batches = 2 * ranks;
    const RunResult single =
        run_pipeline(bf16({.steps = 10, .micro_batches = micro_batches, .cut = {kLayers}}));
    const RunResult in_fp32 =
        run_pipeline({.steps = 10, .micro_batches = micro_batches, .cut = {kLayers}});
    ASSERT_TRUE(in_fp32.status.has_value()) << in_fp32.status.error().message;
    EXPECT_NE(single.losses, in_fp32.losses) << "is it bf16 at all?";
    Rng rng(mix_key({kSeed, static_cast<std::uint64_t>(ranks)}));
    for (const schedule::ScheduleKind kind : kKinds) {
      const plan::Plan plan = random_plan(rng, kind, kLayers, ranks, micro_batches);
      expect_same(
          single, run_pipeline(bf16({.steps = 10, .micro_batches = micro_batches, .plan = plan})),
          fmt::format("seed {}, {} cut {}", kSeed, schedule::name(kind), plan::to_string(plan)));
    }
  }
}

TEST(Bf16Equivalence, RandomPlansWithFreezingEqualNeverMovedBitForBit) {
  constexpr std::uint64_t kSeed = 43;
  constexpr int kRanks = 3;
  constexpr int kMicroBatches = 6;
  RunOptions options = bf16({.steps = 40, .micro_batches = kMicroBatches, .cut = {3, 2, 3}});
  options.freezing = freezing();
  const RunResult still = run_pipeline(options);
  options.before_step = random_plans(kSeed, kRanks, kMicroBatches);
  expect_same(still, run_pipeline(options), fmt::format("seed {}", kSeed));
}

// The planner is told the bytes that pass between ranks and those that a rank holds.
TEST(Bf16Equivalence, CostsSayHalfTheBoundaryTheCopiesAndTheMeteredStashes) {
  for (const auto precision : {cost::Precision::kFp32, cost::Precision::kBf16}) {
    model::LlamaConfig config = small_model();
    const model::Model layers = model::in_precision(model::make_llama(config), precision);
    RunOptions run{.cut = {kLayers}};
    run.precision = precision;
    const PipelineOptions options = pipeline_options(config, run);
    const plan::Plan plan = plan::make_plan(run.cut, run.schedule);
    const auto status =
        transport::run_ranks(1, [&](transport::Transport& transport) -> Expected<void> {
          at::set_num_threads(1);
          Pipeline pipeline(transport, layers, options,
                            {plan, initial_states(layers, plan, Rank(0), run.seed)});
          DYNMO_TRY(pipeline.measure(
              [&](std::int64_t step, MicroBatchId id) { return batch(config, 7, step, id); }, 2));
          const cost::ModelCost costs = *pipeline.costs();
          for (int i = 0; i < kLayers; ++i) {
            const cost::LayerCost& layer = costs.layers[static_cast<std::size_t>(i)];
            EXPECT_EQ(layer.boundary_bytes, model::boundary_bytes(config, 2, precision));
            EXPECT_EQ(layer.copy_bytes * 2,
                      precision == cost::Precision::kBf16 ? layer.parameter_bytes : Bytes{0});
            EXPECT_EQ(layer.activation_bytes,
                      model::activation_bytes(config, LayerId(i), 2, precision))
                << layer.name;
          }
          return {};
        });
    ASSERT_TRUE(status.has_value()) << status.error().message;
  }
}

}  // namespace
}  // namespace dynmo::runtime::testing
