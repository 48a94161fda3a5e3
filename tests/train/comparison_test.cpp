// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/comparison.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/freezing/schedule.h"
#include "dynmo/observe/run_summary.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/runtime/step_report.h"

namespace dynmo::train {
namespace {

constexpr int kLayers = 8;
constexpr int kRanks = 2;
constexpr int kMicroBatches = 8;

cost::ModelCost known() {
  cost::ModelCost model{std::vector<cost::LayerCost>(kLayers)};
  for (cost::LayerCost& layer : model.layers) layer.name = "layer";
  return model;
}

using observe::RunHistory;

// One step of a run; the layers before `frozen` run forward only.
runtime::StepReport step_of(std::int64_t number, int frozen, double step_s) {
  runtime::StepReport step;
  step.step = number;
  step.loss = 5.0 - static_cast<double>(number);
  step.step_s = step_s;
  step.frozen_layers = frozen;
  for (int layer = 0; layer < kLayers; ++layer) {
    const double backward = layer < frozen ? 0 : 1e-3;
    step.layers.push_back({.time = {1e-3, backward, backward}, .update_s = 0, .stash_bytes = {}});
  }
  return step;
}

RunHistory history_of(const std::string& name) { return RunHistory({.name = name}); }

void add(RunHistory& history, const runtime::StepReport& report, const plan::Plan& plan) {
  history.add({report, report.step, /*tokens=*/100, report.layers, plan},
              RunHistory::ranks_of(plan, 1));
}

// Steps of a run under one plan.
RunHistory run(const std::string& name, const plan::Plan& plan, int frozen, int steps,
               double step_s) {
  RunHistory series = history_of(name);
  for (int i = 0; i < steps; ++i) add(series, step_of(i, frozen, step_s), plan);
  return series;
}

TEST(Comparison, SpeedupIsThatOfTokensASecond) {
  const auto plan = plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B);
  const RunHistory slow = run("static", plan, 4, 10, 0.3);
  const RunHistory fast = run("balanced", plan, 4, 10, 0.2);
  const auto compared = compare(slow, fast, known(), kMicroBatches, 1, kRanks);
  ASSERT_TRUE(compared.has_value()) << compared.error().message;
  EXPECT_NEAR(compared->speedup, 1.5, 1e-12);
}

TEST(Comparison, BestIsTheSimulatedOptimumOverAllCuts) {
  const auto plan = plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B);
  const RunHistory series = run("static", plan, 4, 6, 0.3);
  const auto compared = compare(series, series, known(), kMicroBatches, 1, kRanks);
  ASSERT_TRUE(compared.has_value()) << compared.error().message;
  // Brute force over the seven cuts with the same costs.
  cost::ModelCost model = known();
  for (int layer = 0; layer < kLayers; ++layer) {
    model.layers[static_cast<std::size_t>(layer)].forward_s = 1e-3;
    model.layers[static_cast<std::size_t>(layer)].backward_input_s = 1e-3;
    model.layers[static_cast<std::size_t>(layer)].backward_weight_s = 1e-3;
  }
  model = dynamism::freeze_prefix(model, 4);
  const auto cluster = cost::equal_ranks(kRanks);
  double best = 1e9;
  double current = 0;
  for (int first = 1; first < kLayers; ++first) {
    const auto cut = plan::make_plan({first, kLayers - first}, schedule::ScheduleKind::k1F1B);
    const double time = plan::evaluate(cut, {model, cluster, kMicroBatches})->step_time_s;
    best = std::min(best, time);
    if (first == 4) current = time;
  }
  EXPECT_NEAR(compared->best_speedup, current / best, 1e-9);
  EXPECT_GT(compared->best_speedup, 1.2);
}

// Measured steps with noise let the best cut of each gain from it; the costs that the layers were
// given do not, and may change from step to step.
TEST(Comparison, OfGivenCostsItHasNoNoiseInIt) {
  const auto plan = plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B);
  constexpr int kSteps = 6;
  Rng rng(11);
  RunHistory series = history_of("static");
  for (int i = 0; i < kSteps; ++i) {
    runtime::StepReport step = step_of(i, 0, 0.3);
    for (cost::LayerSample& layer : step.layers) {
      const double factor = 1 + 0.3 * rng.uniform();
      layer.time.forward_s *= factor;
      layer.time.input_gradient_s *= factor;
      layer.time.weight_gradient_s *= factor;
    }
    add(series, step, plan);
  }
  // Layers 4 to 7 fall to half before step 3.
  const GivenCosts given = [](std::int64_t step) {
    cost::ModelCost model = known();
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
      const double time = step >= 3 && i >= 4 ? 0.5e-3 : 1e-3;
      model.layers[i].forward_s = time;
      model.layers[i].backward_input_s = time;
      model.layers[i].backward_weight_s = time;
    }
    return model;
  };
  const auto cluster = cost::equal_ranks(kRanks);
  double kept_s = 0;
  double best_s = 0;
  for (int step = 0; step < kSteps; ++step) {
    double least = 1e9;
    for (int first = 1; first < kLayers; ++first) {
      const auto cut = plan::make_plan({first, kLayers - first}, schedule::ScheduleKind::k1F1B);
      const double time = plan::evaluate(cut, {given(step), cluster, kMicroBatches})->step_time_s;
      least = std::min(least, time);
      if (first == 4) kept_s += time;
    }
    best_s += least;
  }
  // The balanced run moves a layer before step 4.
  const auto moved = plan::make_plan({3, 5}, schedule::ScheduleKind::k1F1B);
  RunHistory balanced = history_of("balanced");
  double cuts_s = 0;
  for (int i = 0; i < kSteps; ++i) {
    const plan::Plan& now = i < 4 ? plan : moved;
    add(balanced, step_of(i, 0, 0.2), now);
    cuts_s += plan::evaluate(now, {given(i), cluster, kMicroBatches})->step_time_s;
  }
  const auto compared = compare(series, balanced, known(), kMicroBatches, 1, kRanks, given);
  ASSERT_TRUE(compared.has_value()) << compared.error().message;
  EXPECT_NEAR(compared->best_speedup, kept_s / best_s, 1e-9);
  EXPECT_NEAR(compared->cuts_speedup, kept_s / cuts_s, 1e-9);
  EXPECT_GT(compared->cuts_speedup, 1);
  const auto measured = compare(series, series, known(), kMicroBatches, 1, kRanks);
  ASSERT_TRUE(measured.has_value()) << measured.error().message;
  EXPECT_EQ(measured->cuts_speedup, 0);
  EXPECT_GT(std::abs(measured->best_speedup - kept_s / best_s), 0.01);
}

TEST(Comparison, OfTooManyCutsItIsABound) {
  constexpr int kMany = 64;
  const auto plan =
      plan::make_plan(std::vector<int>(16, kMany / 16), schedule::ScheduleKind::k1F1B);
  RunHistory series = history_of("static");
  for (int i = 0; i < 3; ++i) {
    runtime::StepReport step = step_of(i, 0, 0.3);
    step.layers.assign(kMany, {.time = {1e-3, 1e-3, 1e-3}, .update_s = 0, .stash_bytes = {}});
    add(series, step, plan);
  }
  cost::ModelCost model{std::vector<cost::LayerCost>(kMany)};
  for (cost::LayerCost& layer : model.layers) layer.name = "layer";
  const auto compared = compare(series, series, model, 4, 1, 16);
  ASSERT_TRUE(compared.has_value()) << compared.error().message;
  EXPECT_TRUE(compared->best_is_bound);
  // 4 + 15 slots of a stage's work instead of 4.
  EXPECT_NEAR(compared->best_speedup, 19.0 / 4, 1e-3);
}

// Other ranks wait for the report, so its work is bounded. Every fourth step counts of these.
TEST(Comparison, OfALongRunCountsStepsOfEqualDistance) {
  constexpr int kSteps = 1000;
  const auto plan = plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B);
  RunHistory series = history_of("static");
  for (int i = 0; i < kSteps; ++i) add(series, step_of(i, i % 4 == 0 ? 4 : 0, 0.3), plan);
  const auto all = compare(series, series, known(), kMicroBatches, 1, kRanks);
  const RunHistory counted = run("static", plan, 4, 10, 0.3);
  const auto wanted = compare(counted, counted, known(), kMicroBatches, 1, kRanks);
  ASSERT_TRUE(all.has_value() && wanted.has_value());
  EXPECT_NEAR(all->best_speedup, wanted->best_speedup, 1e-9);
  EXPECT_FALSE(all->best_is_bound);
}

TEST(Comparison, PredictionErrorCountsFromTheFirstMove) {
  const auto plan = plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B);
  RunHistory series = history_of("balanced");
  const std::vector<double> predicted = {0.1, 0.9, 0.8, 1.0};
  for (std::size_t i = 0; i < 4; ++i) {
    runtime::StepReport step = step_of(static_cast<std::int64_t>(i), 0, 1.0);
    step.predicted_s = predicted[i];
    if (i == 1) {
      step.moved_layers = 1;
      step.migrate_s = 0.1;  // 0.9 without the move: predicted exactly
    }
    add(series, step, plan);
  }
  const observe::PredictionError error = observe::prediction_error(series);
  EXPECT_EQ(error.steps, 3);
  EXPECT_NEAR(error.worst, 0.2, 1e-12);
  EXPECT_NEAR(error.median, 0.0, 1e-12);
}

TEST(RunHistory, LossDigestSeesOneBit) {
  const auto plan = plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B);
  const RunHistory a = run("a", plan, 0, 4, 1.0);
  RunHistory b = run("b", plan, 0, 3, 1.0);
  RunHistory c = run("c", plan, 0, 3, 1.0);
  runtime::StepReport last = step_of(3, 0, 1.0);
  add(b, last, plan);
  last.loss = std::nextafter(last.loss, 10);
  add(c, last, plan);
  EXPECT_EQ(a.loss_digest(), b.loss_digest());
  EXPECT_NE(a.loss_digest(), c.loss_digest());
}

TEST(RunHistory, OfALongRunStaysBounded) {
  const auto plan = plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B);
  constexpr int kSteps = 3 * static_cast<int>(RunHistory::kMaxSample);
  const RunHistory series = run("long", plan, 0, kSteps, 0.5);
  EXPECT_EQ(series.count(), kSteps);
  EXPECT_NEAR(series.seconds(), 0.5 * kSteps, 1e-6);
  EXPECT_EQ(series.newest().size(), RunHistory::kMaxNewest);
  EXPECT_EQ(series.newest().back().step, kSteps - 1);
  EXPECT_LE(series.sample().size(), RunHistory::kMaxSample);
  for (std::size_t i = 0; i < series.sample().size(); ++i) {
    ASSERT_EQ(series.sample()[i].step, static_cast<std::int64_t>(4 * i));
  }
  EXPECT_EQ(series.sample().size(), static_cast<std::size_t>(kSteps) / 4);
}

}  // namespace
}  // namespace dynmo::train
