// SPDX-License-Identifier: Apache-2.0
// What a step says of itself: its bubble, and the time that was predicted for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <thread>

#include "dynmo/core/median.h"
#include "dynmo/model/emulated.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

// Every step of one rank, whose embedding takes long to update and freezes half-way. The update
// belongs to the step before: counted with this step's time, it left less than nothing idle.
TEST(StepReport, TheBubbleIsOfTheTimeThatIsCounted) {
  model::LlamaConfig config = small_model();
  config.shape.vocabulary = 100'000;
  config.shape.hidden = 64;
  config.shape.blocks = 1;
  RunOptions run{.steps = 8, .micro_batches = 1};
  run.freezing = dynamism::FreezingSchedule{.start = 0.5, .end = 0.5, .fraction = 0.25};
  const model::Model layers = model::make_llama(config);
  PipelineOptions options = pipeline_options(config, run);
  const plan::Plan plan = plan::make_plan({4}, schedule::ScheduleKind::k1F1B);
  std::vector<StepReport> reports;
  const auto status =
      transport::run_ranks(1, [&](transport::Transport& transport) -> Expected<void> {
        at::set_num_threads(1);
        Pipeline pipeline(transport, layers, options,
                          {plan, initial_states(layers, plan, Rank(0), run.seed)});
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
    EXPECT_LT(report.bubble, 1) << "step " << report.step;
    EXPECT_GT(report.update_s, 0) << "step " << report.step;
    EXPECT_LT(report.update_s, report.step_s) << "step " << report.step;
  }
}

// Layers that sleep on two ranks, whose messages and micro-batches take long.
struct SlowRun {
  static constexpr int kSteps = 10;
  int replicas = 1;
  int accumulation = 1;
  std::chrono::milliseconds tokens{0};     // that reading a micro-batch takes
  std::chrono::milliseconds receives{0};   // of every message, from being posted
  std::chrono::milliseconds reduction{0};  // the same, of those that sum gradients

  struct Result {
    double error = 0;  // |predicted - measured| / measured step time, the median over the steps
    cost::StepSample overhead;
  };
  [[nodiscard]] Result result() const {
    const auto costs = [](std::int64_t) {
      cost::ModelCost model;
      for (int i = 0; i < 4; ++i) {
        cost::LayerCost layer;
        layer.name = fmt::format("layer{}", i);
        layer.forward_s = layer.backward_input_s = layer.backward_weight_s = 5e-3;
        layer.parameter_bytes = Bytes{4096};
        layer.boundary_bytes = Bytes{256};
        model.layers.push_back(layer);
      }
      return model;
    };
    const model::Model layers = model::make_emulated({.memory_scale = 1, .costs = costs}).value();
    const model::LlamaConfig config = small_model();
    PipelineOptions options = pipeline_options(
        config,
        {.steps = kSteps, .micro_batches = 4, .accumulation = accumulation, .replicas = replicas});
    options.boundary_shape = model::emulated_boundary(costs(0));
    const plan::Plan plan = plan::make_plan({2, 2}, schedule::ScheduleKind::k1F1B);
    std::vector<transport::Fault> faults;
    if (receives.count() > 0) {
      faults.push_back({.kind = transport::Fault::Kind::kDelay,
                        .on = transport::Fault::On::kReceive,
                        .count = 1'000'000,
                        .delay = receives});
    }
    if (reduction.count() > 0) {
      faults.push_back({.kind = transport::Fault::Kind::kDelay,
                        .on = transport::Fault::On::kReceive,
                        .first_tag = transport::kFirstReductionTag,
                        .last_tag = transport::kFirstScheduleTag - 1,
                        .count = 1'000'000,
                        .delay = reduction});
    }
    Result result;
    std::vector<double> errors;
    const auto status =
        transport::run_ranks(2 * replicas, [&](transport::Transport& inner) -> Expected<void> {
          at::set_num_threads(1);
          const auto transport = transport::with_faults(inner, faults);
          Pipeline pipeline(*transport, layers, options,
                            {plan, initial_states(layers, plan, Rank(inner.rank().value % 2), 1)});
          const auto batches = [&](std::int64_t step, MicroBatchId id) {
            std::this_thread::sleep_for(tokens);
            return batch(config, 1, step, id);
          };
          DYNMO_TRY(pipeline.measure(batches, 3));
          for (int step = 0; step < kSteps; ++step) {
            DYNMO_ASSIGN(const StepReport report, pipeline.step(batches));
            if (inner.rank() != transport::Member(0)) continue;
            const double measured = report.step_s - report.plan_s;
            errors.push_back(std::abs(report.predicted_s - measured) / measured);
            result.overhead = pipeline.profiler().overhead();
          }
          return {};
        });
    EXPECT_TRUE(status.has_value()) << status.error().message;
    result.error = median(std::move(errors));
    return result;
  }
};

// The machine may be busy in many runs; what is left out of a prediction is left out in all.
bool in_one_of_twenty_runs(const std::function<bool()>& holds) {
  for (int run = 0; run < 20; ++run) {
    if (holds()) return true;
  }
  return false;
}

// A prediction replays what was measured. With the layers' own times alone, the second would be off
// by a quarter, the last two by a quarter to two fifths.
TEST(Prediction, KnowsWhatAStepTakesBesideItsLayers) {
  using std::chrono::milliseconds;
  const auto within_15_percent = [](const SlowRun& run) {
    return in_one_of_twenty_runs([&] { return run.result().error < 0.15; });
  };
  EXPECT_TRUE(within_15_percent({}));
  EXPECT_TRUE(within_15_percent({.tokens = milliseconds(5)}));
  EXPECT_TRUE(within_15_percent({.replicas = 2, .reduction = milliseconds(50)}));
  EXPECT_TRUE(within_15_percent({.replicas = 2, .accumulation = 2, .reduction = milliseconds(50)}));
}

// A round trip takes the delay once: the answer was posted for before the question.
TEST(Prediction, MessagesAreMeasuredThereAndBack) {
  EXPECT_TRUE(in_one_of_twenty_runs([] {
    const cost::StepSample overhead =
        SlowRun{.receives = std::chrono::milliseconds(20)}.result().overhead;
    EXPECT_TRUE(overhead.message_s && overhead.action_s && overhead.overhead_s);
    EXPECT_FALSE(overhead.reduction_bytes_per_s);
    EXPECT_GE(overhead.message_s.value_or(0), 0.0095);
    return overhead.message_s.value_or(1) < 0.02 && overhead.action_s.value_or(1) < 0.005;
  }));
}

}  // namespace
}  // namespace dynmo::runtime::testing
