// SPDX-License-Identifier: Apache-2.0
// Steps of emulated ranks in the time of their devices: whatever else the machine does, layers take
// what they cost, and no step is shorter than its replay without messages.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/model/emulated/layer.h"
#include "dynmo/plan/evaluate.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

using schedule::ActionKind;
using schedule::ScheduleKind;

constexpr int kEmulatedMicroBatches = 6;
constexpr int kEmulatedSteps = 3;

// Layers of 0.2 to 1.2 ms a pass, in whole nanoseconds.
cost::ModelCost random_costs(int layers, Rng& rng) {
  const auto pass_s = [&] { return 1e-9 * static_cast<double>(200'000 + rng.below(1'000'000)); };
  cost::ModelCost model;
  for (int i = 0; i < layers; ++i) {
    cost::LayerCost layer;
    layer.name = fmt::format("layer{}", i);
    layer.forward_s = pass_s();
    layer.backward_input_s = pass_s();
    layer.backward_weight_s = pass_s();
    layer.parameter_bytes = Bytes{4096};
    layer.boundary_bytes = Bytes{4096};
    model.layers.push_back(layer);
  }
  return model;
}

struct Steps {
  std::vector<std::vector<StepReport>> by_rank;
};

Expected<Steps> train(const plan::Plan& plan, const cost::ModelCost& costs) {
  const model::Model layers =
      model::make_emulated({.costs = [&](std::int64_t) { return costs; }}).value();
  PipelineOptions options = pipeline_options(
      small_model(), {.steps = kEmulatedSteps, .micro_batches = kEmulatedMicroBatches});
  options.boundary_shape = model::emulated_boundary(costs);
  options.balancing = Balancing::kNever;
  Steps steps;
  steps.by_rank.resize(static_cast<std::size_t>(plan.ranks));
  DYNMO_TRY(
      transport::run_ranks(plan.ranks, [&](transport::Transport& transport) -> Expected<void> {
        at::set_num_threads(1);
        Pipeline pipeline(transport, layers, options,
                          {plan, initial_states(layers, plan, Rank(transport.rank().value), 1)});
        for (int step = 0; step < kEmulatedSteps; ++step) {
          DYNMO_ASSIGN(StepReport report,
                       pipeline.step([](std::int64_t, MicroBatchId) { return MicroBatch{}; }));
          steps.by_rank[transport.rank().index()].push_back(std::move(report));
        }
        return {};
      }));
  return steps;
}

struct Span {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};
using Key = std::tuple<ActionKind, int, int>;  // kind, stage, micro-batch

std::map<Key, Span> spans_of(const Steps& steps, std::size_t step) {
  std::map<Key, Span> spans;
  for (const std::vector<StepReport>& reports : steps.by_rank) {
    const StepReport& report = reports[step];
    for (const schedule::TimedAction& timed : report.actions) {
      spans[{timed.action.kind, timed.action.stage.value, timed.action.micro_batch.value}] = {
          report.start_ns + timed.start.count(), report.start_ns + timed.end.count()};
    }
  }
  return spans;
}

// Where the gradient of a stage's input is made.
const Span& backward(const std::map<Key, Span>& spans, int stage, int micro_batch) {
  const auto whole = spans.find({ActionKind::kBackward, stage, micro_batch});
  return whole != spans.end() ? whole->second
                              : spans.at({ActionKind::kInputGradient, stage, micro_batch});
}

struct EmulatedCase {
  ScheduleKind kind;
  std::vector<int> counts;
  friend void PrintTo(const EmulatedCase& c, std::ostream* out) { *out << schedule::name(c.kind); }
};

class EmulatedSteps : public ::testing::TestWithParam<EmulatedCase> {
 protected:
  [[nodiscard]] plan::Plan plan() const {
    const auto& [kind, counts] = GetParam();
    const int ranks = 3;
    const int rounds = static_cast<int>(counts.size()) / ranks;
    return plan::make_plan(counts,
                           kind == ScheduleKind::kZbV ? schedule::wave_placement(ranks, rounds)
                                                      : schedule::loop_placement(ranks, rounds),
                           ranks, kind);
  }
};

TEST_P(EmulatedSteps, AreNoShorterThanTheirReplayAndKeepTheOrderOfTheirValues) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    Rng rng(seed);
    const plan::Plan plan = this->plan();
    const int stages = static_cast<int>(plan.stages.size());
    const cost::ModelCost costs = random_costs(plan.stages.back().layers.end(), rng);
    const auto steps = train(plan, costs);
    ASSERT_TRUE(steps.has_value()) << steps.error().message;
    const auto replay = plan::evaluate(plan, {costs, cost::equal_ranks(3), kEmulatedMicroBatches});
    ASSERT_TRUE(replay.has_value()) << replay.error().message;
    for (std::size_t step = 0; step < kEmulatedSteps; ++step) {
      const std::map<Key, Span> spans = spans_of(*steps, step);
      std::int64_t first = INT64_MAX;
      std::int64_t last = 0;
      for (const auto& [key, span] : spans) {
        first = std::min(first, span.begin_ns);
        last = std::max(last, span.end_ns);
      }
      EXPECT_GE(static_cast<double>(last - first), replay->step_time_s * 1e9 - 1000)
          << "seed " << seed << " step " << step;
      for (int micro_batch = 0; micro_batch < kEmulatedMicroBatches; ++micro_batch) {
        for (int stage = 0; stage + 1 < stages; ++stage) {
          const auto at = [&](int s) { return spans.at({ActionKind::kForward, s, micro_batch}); };
          EXPECT_GE(at(stage + 1).begin_ns, at(stage).end_ns)
              << "seed " << seed << " F of stage " << stage + 1;
          EXPECT_GE(backward(spans, stage, micro_batch).begin_ns,
                    backward(spans, stage + 1, micro_batch).end_ns)
              << "seed " << seed << " B of stage " << stage;
        }
      }
    }
  }
}

// To the nanosecond, on a machine that is as busy as it likes: a layer's time is the device's. (The
// first layer's forward has the reading of tokens in it.)
TEST_P(EmulatedSteps, MeasureWhatTheLayersCost) {
  Rng rng(4);
  const plan::Plan plan = this->plan();
  const cost::ModelCost costs = random_costs(plan.stages.back().layers.end(), rng);
  const auto steps = train(plan, costs);
  ASSERT_TRUE(steps.has_value()) << steps.error().message;
  for (const StepReport& report : steps->by_rank[0]) {
    for (std::size_t i = 0; i < report.layers.size(); ++i) {
      const cost::LayerTime& time = report.layers[i].time;
      EXPECT_GE(time.forward_s, costs.layers[i].forward_s - 1e-12) << i;
      if (i > 0) {
        EXPECT_NEAR(time.forward_s, costs.layers[i].forward_s, 1e-12) << i;
      }
      EXPECT_NEAR(time.input_gradient_s, costs.layers[i].backward_input_s, 1e-12) << i;
      EXPECT_NEAR(time.weight_gradient_s, costs.layers[i].backward_weight_s, 1e-12) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, EmulatedSteps,
                         ::testing::Values(EmulatedCase{ScheduleKind::kGpipe, {2, 1, 2}},
                                           EmulatedCase{ScheduleKind::k1F1B, {1, 3, 2}},
                                           EmulatedCase{ScheduleKind::kInterleaved,
                                                        {1, 1, 2, 1, 1, 1}},
                                           EmulatedCase{ScheduleKind::kZbH1, {2, 1, 1}},
                                           EmulatedCase{ScheduleKind::kZbV, {1, 2, 1, 1, 1, 1}}),
                         [](const auto& test) {
                           std::string name(schedule::name(test.param.kind));
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace dynmo::runtime::testing
