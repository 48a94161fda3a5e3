// SPDX-License-Identifier: Apache-2.0
// What a step says of itself: its bubble, and the time that was predicted for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <vector>

#include "dynmo/model/emulated/layer.h"
#include "dynmo/runtime/rank_times.h"
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

// Layers that sleep on two ranks, whose messages and micro-batches take long. A sleep takes at
// least as long as it was asked for, on a busy machine longer.
struct SlowRun {
  static constexpr int kMicroBatches = 4;
  static constexpr double kLayer =
      5e-3;  // of each of four layers, forward and each half of backward
  static constexpr double kLeast =
      (kMicroBatches + 1) * 2 * 3 * kLayer;  // 1F1B of two equal stages
  static constexpr std::int64_t kLayerBytes = 4096;
  int replicas = 1;
  int accumulation = 1;
  std::chrono::milliseconds tokens{0};     // that reading a micro-batch takes
  std::chrono::milliseconds receives{0};   // of every message, from being posted
  std::chrono::milliseconds reduction{0};  // the same, of those that sum gradients

  struct Result {
    double predicted_s = 0;  // of the second step
    double most_s = 0;       // that the times measured before it can make of a step of 1F1B
    cost::StepSample overhead = {};
  };
  [[nodiscard]] Result result() const {
    const auto costs = [](std::int64_t) {
      cost::ModelCost model;
      for (int i = 0; i < 4; ++i) {
        cost::LayerCost layer;
        layer.name = fmt::format("layer{}", i);
        layer.forward_s = layer.backward_input_s = layer.backward_weight_s = kLayer;
        layer.parameter_bytes = Bytes{kLayerBytes};
        layer.boundary_bytes = Bytes{256};
        model.layers.push_back(layer);
      }
      return model;
    };
    const model::Model layers = model::make_emulated({.memory_scale = 1, .costs = costs}).value();
    const model::LlamaConfig config = small_model();
    PipelineOptions options = pipeline_options(config, {.steps = 2,
                                                        .micro_batches = kMicroBatches,
                                                        .accumulation = accumulation,
                                                        .replicas = replicas});
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
          DYNMO_TRY(pipeline.step(batches));
          DYNMO_ASSIGN(const StepReport report, pipeline.step(batches));
          if (inner.rank() == transport::Member(0)) {
            const control::Profiler& measured = pipeline.profiler();
            result = {.predicted_s = report.predicted_s,
                      .most_s = most_s(*measured.costs(0), measured.overhead()),
                      .overhead = measured.overhead()};
          }
          return {};
        });
    EXPECT_TRUE(status.has_value()) << status.error().message;
    return result;
  }

 private:
  // The slower stage's time in every micro-batch and once more for the other's, with each action's
  // and message's own, and the reduction after the last.
  [[nodiscard]] double most_s(const cost::ModelCost& costs,
                              const cost::StepSample& overhead) const {
    std::array<double, 2> stage_s{};
    for (std::size_t i = 0; i < costs.layers.size(); ++i) {
      const cost::LayerCost& layer = costs.layers[i];
      stage_s[i / 2] += layer.forward_s + layer.backward_input_s + layer.backward_weight_s;
    }
    const double actions = 2.0 * (kMicroBatches + 1);
    const double round_s = std::max(stage_s[0], stage_s[1]) * (kMicroBatches + 1) +
                           actions * (*overhead.action_s + *overhead.message_s);
    const double reduction_s =
        overhead.reduction_bytes_per_s ? 2 * kLayerBytes / *overhead.reduction_bytes_per_s : 0;
    return accumulation * round_s + reduction_s + *overhead.overhead_s;
  }
};

// A prediction replays what was measured. With the layers' own times alone it would be less than
// each `least_s`, by up to two fifths; what it counted twice would be more than the measured times
// can come to.
TEST(Prediction, KnowsWhatAStepTakesBesideItsLayers) {
  using std::chrono::milliseconds;
  struct Case {
    SlowRun run;
    double least_s;
  };
  for (const auto& [run, least_s] :
       std::vector<Case>{{{}, SlowRun::kLeast},
                         {{.tokens = milliseconds(5)}, SlowRun::kLeast + 3 * 5e-3},
                         {{.replicas = 2, .reduction = milliseconds(50)}, SlowRun::kLeast + 0.1},
                         {{.replicas = 2, .accumulation = 2, .reduction = milliseconds(50)},
                          2 * SlowRun::kLeast + 0.1},
                         {{.receives = milliseconds(20)}, SlowRun::kLeast + 6 * 0.01}}) {
    const SlowRun::Result result = run.result();
    EXPECT_GE(result.predicted_s, 0.999 * least_s);  // (Medians and rates round.)
    EXPECT_LE(result.predicted_s, 1.001 * result.most_s) << least_s;
  }
}

// A message's own time is half of a round trip, which takes the delay of one receive at least.
TEST(Prediction, MessagesAreMeasuredThereAndBack) {
  const cost::StepSample overhead =
      SlowRun{.receives = std::chrono::milliseconds(20)}.result().overhead;
  ASSERT_TRUE(overhead.message_s && overhead.action_s && overhead.overhead_s);
  EXPECT_FALSE(overhead.reduction_bytes_per_s);
  EXPECT_GE(*overhead.message_s, 0.01);
}

// The time that an action takes beside its layers has no waiting and no reducing in it.
TEST(StepReport, AnActionsOwnTimeIsWhatNobodyElseCounts) {
  StepOutput output;
  output.seconds = 20;
  output.waiting_s = 8;
  output.layer_times[LayerId(0)] = {
      {.forward_s = 1, .input_gradient_s = 2, .weight_gradient_s = 1.5}, {.forward_s = 0.5}};
  output.actions.resize(4);
  RankTimes times;
  times.reducing_s = 3;
  const RankStats own = own_figures({}, output, times, {}, {});
  EXPECT_EQ(own.figures.action_overhead_s, 20 - 8 - 5 - 3);
  EXPECT_EQ(own.figures.actions, 4);
}

}  // namespace
}  // namespace dynmo::runtime::testing
