// SPDX-License-Identifier: Apache-2.0
// What a step says of itself: its bubble, and the time that was predicted for it.
#include <gtest/gtest.h>

#include <algorithm>

#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

// Every step of one rank, whose embedding takes long to update and freezes half-way. The update
// belongs to the step before: counted with this step's time, it left less than nothing idle.
TEST(StepReport, TheBubbleIsOfTheTimeThatIsCounted) {
  model::LlamaConfig config = small_model();
  config.vocabulary = 100'000;
  config.hidden = 64;
  config.blocks = 1;
  RunOptions run{.steps = 8, .micro_batches = 1};
  run.freezing = dynamism::FreezingSchedule{.start = 0.5, .end = 0.5, .fraction = 0.25};
  const model::Model layers = model::make_llama(config);
  PipelineOptions options = pipeline_options(config, run);
  const plan::Plan plan = plan::make_plan({4}, schedule::ScheduleKind::k1F1B);
  std::vector<StepReport> reports;
  const auto status =
      transport::run_ranks(1, [&](transport::Transport& transport) -> Expected<void> {
        at::set_num_threads(1);
        Pipeline pipeline(transport, layers, options, plan,
                          initial_states(layers, plan, Rank(0), run.seed));
        for (int step = 0; step < run.steps; ++step) {
          DYNMO_ASSIGN(StepReport report, pipeline.step([&](std::int64_t at, MicroBatchId id) {
            return batch(config, run.seed, at, id);
          }));
          reports.push_back(std::move(report));
        }
        return {};
      });
  ASSERT_TRUE(status.has_value()) << status.error().message;
  EXPECT_EQ(reports.back().frozen_layers, 1);
  for (const StepReport& report : reports) {
    EXPECT_GE(report.bubble, 0) << "step " << report.step;
    EXPECT_LT(report.bubble, 0.5) << "step " << report.step;
  }
}

}  // namespace
}  // namespace dynmo::runtime::testing
