// SPDX-License-Identifier: Apache-2.0
// Layers that were frozen and train again.
#include <gtest/gtest.h>

#include "dynmo/core/rng.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

// Fixed steps of freezing: `layers` of them from the start to step `until`.
class Until final : public dynamism::Source {
 public:
  Until(int layers, std::int64_t until) : layers_(layers), until_(until) {}
  std::string_view name() const override { return "until"; }
  Expected<dynamism::Change> before_step(const dynamism::Boundary& now) override {
    return dynamism::Change{.frozen_layers = now.step < until_ ? layers_ : 0};
  }

 private:
  int layers_;
  std::int64_t until_;
};

PipelineOptions until(int layers, std::int64_t step, const RunOptions& run) {
  PipelineOptions options = pipeline_options(small_model(), run);
  options.make_sources = [=](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(std::make_unique<Until>(layers, step));
    return sources;
  };
  return options;
}

// Losses and layers of the steps from `state` on, on one rank of the group.
struct Part {
  std::vector<double> losses = {};
  std::map<int, std::string> states = {};
};

Expected<Part> run_part(Pipeline& pipeline, int steps, const RunOptions& run) {
  Part part;
  for (int i = 0; i < steps; ++i) {
    DYNMO_ASSIGN(const StepReport report, pipeline.step([&](std::int64_t step, MicroBatchId id) {
      return batch(small_model(), run.seed, step, id);
    }));
    part.losses.push_back(report.loss);
  }
  for (const auto& [id, state] : pipeline.states()) {
    part.states[id.value] = model::digest(state).hex();
  }
  return part;
}

// To train again is to go on from the values with moments of 0 and no update counted: 20 steps.
TEST(Unfreezing, IsARunResumedByHandWithFreshMoments) {
  constexpr int kFrozenSteps = 8;
  constexpr int kAfter = 20;
  constexpr int kFrozen = 5;
  RunOptions run{.steps = kFrozenSteps + kAfter};
  const model::Model layers = model::make_llama(small_model());
  for (const std::vector<int>& cut :
       {std::vector{kLayers}, std::vector{3, 5}, std::vector{2, 4, 2}}) {
    const plan::Plan plan = plan::make_plan(cut, run.schedule);
    const auto done =
        transport::run_ranks(plan.ranks, [&](transport::Transport& transport) -> Expected<void> {
          at::set_num_threads(1);
          const Rank rank(transport.rank().value);
          const auto initial = [&] { return initial_states(layers, plan, rank, run.seed); };

          Pipeline thawed(transport, layers, until(kFrozen, kFrozenSteps, run), {plan, initial()});
          DYNMO_TRY(run_part(thawed, kFrozenSteps, run));
          DYNMO_ASSIGN(const Part after, run_part(thawed, kAfter, run));
          EXPECT_EQ(thawed.frozen_layers(), 0);

          Pipeline frozen(transport, layers, until(kFrozen, run.steps, run), {plan, initial()});
          DYNMO_TRY(run_part(frozen, kFrozenSteps, run));
          RankState state = frozen.take_state();
          for (auto& [id, layer] : state.layers) {
            if (id.value >= kFrozen) continue;
            EXPECT_TRUE(layer.frozen);
            layer.frozen = false;
            layer.optimizer_steps = 0;
            for (model::Parameter& parameter : layer.parameters) {
              parameter.gradient = at::zeros_like(parameter.value);
              parameter.first_moment = at::zeros_like(parameter.value);
              parameter.second_moment = at::zeros_like(parameter.value);
            }
          }
          Pipeline resumed(transport, layers, pipeline_options(small_model(), run),
                           {.plan = plan, .layers = std::move(state.layers), .step = kFrozenSteps});
          DYNMO_ASSIGN(const Part by_hand, run_part(resumed, kAfter, run));

          EXPECT_EQ(after.losses, by_hand.losses);
          EXPECT_EQ(after.states, by_hand.states);
          return {};
        });
    ASSERT_TRUE(done) << done.error().message;
  }
}

// Under every schedule, with stages that were wholly frozen, and an order that was made for them.
TEST(Unfreezing, ChangesNoBitUnderAnySchedule) {
  constexpr int kSteps = 12;
  constexpr int kFrozen = 6;
  RunOptions run{.steps = kSteps, .micro_batches = 6, .cut = {kLayers}};
  run.make_sources = until(kFrozen, kSteps / 2, run).make_sources;
  const RunResult single = run_pipeline(run);
  for (const auto kind : kKinds) {
    Rng rng(mix_key({0x7411, static_cast<std::uint64_t>(kind)}));
    run.plan = random_plan(rng, kind, kLayers, 3, run.micro_batches);
    expect_same(single, run_pipeline(run), fmt::format("schedule {}", schedule::name(kind)));
  }
  plan::Plan order = plan::make_plan({3, 2, 3}, schedule::ScheduleKind::k1F1B);
  order.order = plan::schedule_of(order, run.micro_batches, kFrozen).value().ranks;
  order.schedule = schedule::ScheduleKind::kAdaptive;
  run.plan = order;
  expect_same(single, run_pipeline(run), "an order of frozen stages");
}

// The first decision afterwards knows what the layers cost, and moves them back.
TEST(Unfreezing, IsPlannedForAtOnceFromTheLastTrainedTimes) {
  constexpr int kSteps = 24;
  RunOptions run{.steps = kSteps, .cut = {4, 4}};
  run.balancing = Balancing::kAutomatic;
  run.make_sources = until(5, kSteps / 2, run).make_sources;
  std::optional<cost::ModelCost> costs;
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != kSteps / 2 || pipeline.grid().rank() != WorldRank(0)) return {};
    costs = pipeline.profiler().costs(0);
    return {};
  };
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  ASSERT_TRUE(costs.has_value());
  for (std::size_t i = 0; i < costs->layers.size(); ++i) {
    EXPECT_GT(costs->layers[i].backward_weight_s, 0) << i;
    EXPECT_EQ(costs->layers[i].backward_input_s > 0, i > 0) << i;
  }
  RunOptions still = run;
  still.balancing = Balancing::kNever;
  still.before_step = {};
  expect_same(run_pipeline(still), result, "balanced or not");
}

}  // namespace
}  // namespace dynmo::runtime::testing
