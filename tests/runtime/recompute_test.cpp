// SPDX-License-Identifier: Apache-2.0
// Recomputed layers in a whole pipeline: no bit changes, stashes are as small as predicted.
#include "dynmo/plan/recompute.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>

#include "dynmo/model/recompute.h"
#include "dynmo/schedule/lowering.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

TEST(RecomputePipeline, WholeChangesNoBitUnderAnyScheduleFreezingAndMoves) {
  for (const auto kind : {schedule::ScheduleKind::k1F1B, schedule::ScheduleKind::kZbH1}) {
    RunOptions options{.steps = 12, .cut = {3, 2, 3}, .schedule = kind};
    options.freezing = freezing();
    const RunResult none = run_pipeline(options);
    options.recompute = plan::Recompute::kWhole;
    options.before_step = [](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      EXPECT_EQ(std::ssize(pipeline.recomputed()), kLayers - std::max(1, pipeline.frozen_layers()));
      if (step != 4) return {};
      DYNMO_TRY(pipeline.apply(plan::make_plan({2, 3, 3}, pipeline.plan().schedule, 1)));
      return {};
    };
    expect_same(none, run_pipeline(options), std::string(schedule::name(kind)));
  }
}

// The engine's own metering of every layer, and the sum over a rank at its peak.
TEST(RecomputePipeline, AutoFitsALimitThatNoneDoesNotAndTheMeterAgrees) {
  constexpr int kRanks = 2;
  const model::LlamaConfig config = small_model();
  const model::Model layers = model::make_llama(config);
  const plan::Plan plan = plan::make_plan({4, 4}, schedule::ScheduleKind::kGpipe);
  RunOptions run{.cut = {4, 4}};
  const PipelineOptions plain = pipeline_options(config, run);
  const auto batches = [&](std::int64_t step, MicroBatchId id) {
    return batch(config, run.seed, step, id);
  };
  std::mutex mutex;
  std::map<int, std::vector<double>> losses;  // by choice
  const auto status =
      transport::run_ranks(kRanks, [&](transport::Transport& transport) -> Expected<void> {
        at::set_num_threads(1);
        const Rank rank(transport.rank().value);
        const auto states = [&] { return initial_states(layers, plan, rank, run.seed); };
        Pipeline none(transport, layers, plain, {plan, states()});
        DYNMO_TRY(none.measure(batches, 2));
        const cost::ModelCost costs = *none.costs();
        const auto all = plan::peak_memory(plan, costs, run.micro_batches, {}).value();

        PipelineOptions limited = plain;
        limited.recompute = plan::Recompute::kAuto;
        limited.memory = Bytes{std::max(all[0], all[1]).value * 85 / 100};
        Pipeline tight(transport, layers, limited, {plan, states()});
        DYNMO_TRY(tight.use(none.profiler()));
        const plan::LayerSet set = tight.recomputed();
        EXPECT_FALSE(set.empty());
        EXPECT_LT(std::ssize(set), kLayers - 1);
        const auto peaks = plan::peak_memory(plan, costs, run.micro_batches, set).value();
        for (const Bytes peak : peaks) EXPECT_LE(peak, limited.memory);

        // A step of the schedule with that set: each layer's stash is what the costs predict.
        const cost::ModelCost predicted = plan::recomputed(costs, set);
        model::Model running = layers;
        for (const LayerId id : set) running[id.index()] = model::recomputed(layers[id.index()]);
        const auto lowered = schedule::lower(plan::schedule_of(plan, run.micro_batches, 0).value());
        const StepInput input{.lowered = lowered,
                              .plan = plan,
                              .meter_stashes = true,
                              .boundary_shape = plain.boundary_shape,
                              .batch = [&](MicroBatchId id) { return batches(0, id); }};
        LayerStates fresh = states();
        DYNMO_ASSIGN(const StepOutput output, run_schedule(transport, 0, running, input, fresh));
        for (const auto& [id, bytes] : output.stash_bytes) {
          EXPECT_EQ(bytes, predicted.layers[id.index()].activation_bytes) << "layer " << id.value;
        }

        limited.memory = Bytes{1000};
        Pipeline impossible(transport, layers, limited, {plan, states()});
        const auto refused = impossible.use(none.profiler());
        EXPECT_FALSE(refused.has_value());
        if (!refused) {
          EXPECT_EQ(refused.error().code, ErrorCode::kInfeasible);
        }

        for (Pipeline* pipeline : {&none, &tight}) {
          for (int step = 0; step < 4; ++step) {
            DYNMO_ASSIGN(const StepReport report, pipeline->step(batches));
            const std::lock_guard lock(mutex);
            if (rank == Rank(0)) losses[pipeline == &none ? 0 : 1].push_back(report.loss);
          }
        }
        // The profiler's times of a layer do not depend on whether it is recomputed.
        for (const LayerId id : set) {
          EXPECT_EQ(tight.costs()->layers[id.index()].activation_bytes,
                    costs.layers[id.index()].activation_bytes);
        }
        return {};
      });
  ASSERT_TRUE(status.has_value()) << status.error().message;
  EXPECT_EQ(losses[0].size(), 4U);
  EXPECT_EQ(losses[0], losses[1]);
}

Bytes largest_of(const std::vector<Bytes>& peaks) {
  return *std::max_element(peaks.begin(), peaks.end());
}

// The measurements of a run before its first step. The memory lies halfway between the need of its
// cut with all layers recomputed and with none.
struct Measured {
  std::optional<control::Profiler> profiler;
  Bytes memory;
};

Measured measured_under(const RunOptions& run) {
  const model::LlamaConfig config = small_model();
  const model::Model layers = model::make_llama(config);
  const plan::Plan plan = plan::make_plan(run.cut, run.schedule);
  const auto batches = [&](std::int64_t step, MicroBatchId id) {
    return batch(config, run.seed, step, id);
  };
  Measured measured;
  const auto status =
      transport::run_ranks(plan.ranks, [&](transport::Transport& transport) -> Expected<void> {
        at::set_num_threads(1);
        const Rank rank(transport.rank().value);
        Pipeline pipeline(transport, layers, pipeline_options(config, run),
                          {plan, initial_states(layers, plan, rank, run.seed)});
        DYNMO_TRY(pipeline.measure(batches, 2));
        if (rank != Rank(0)) return {};
        const cost::ModelCost costs = *pipeline.costs();
        DYNMO_ASSIGN(const auto none, plan::peak_memory(plan, costs, run.micro_batches, {}));
        DYNMO_ASSIGN(const auto all,
                     plan::peak_memory(plan, costs, run.micro_batches, plan::all_layers(costs)));
        measured.memory = Bytes{(largest_of(none) + largest_of(all)).value / 2};
        measured.profiler = pipeline.profiler();
        return {};
      });
  EXPECT_TRUE(status) << status.error().message;
  return measured;
}

// Layers freeze, plans are made with sets of their own, and no bit changes.
TEST(RecomputePipeline, DecisionsThatChooseLayersToRecomputeChangeNoBit) {
  RunOptions run{.steps = 24, .cut = {4, 4}};
  run.freezing = freezing();
  const RunResult none = run_pipeline(run);
  const Measured measured = measured_under(run);
  run.memory = measured.memory;
  run.recompute = plan::Recompute::kAuto;
  run.balancing = Balancing::kAutomatic;
  std::atomic<int> recomputed = 0;
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step == 0) DYNMO_TRY(pipeline.use(*measured.profiler));
    if (!pipeline.recomputed().empty()) ++recomputed;
    DYNMO_ASSIGN(const auto peaks, plan::peak_memory(pipeline.plan(), *pipeline.costs(),
                                                     run.micro_batches, pipeline.recomputed()));
    EXPECT_LE(largest_of(peaks), run.memory) << "step " << step;
    return {};
  };
  expect_same(none, run_pipeline(run), "chosen");
  EXPECT_GT(recomputed, 0);
}

}  // namespace
}  // namespace dynmo::runtime::testing
