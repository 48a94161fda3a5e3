// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/comparison.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/dynamism/freezing.h"
#include "dynmo/plan/evaluate.h"

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

// Steps of a run under one plan; the layers before `frozen` run forward only.
RunSeries run(const std::string& name, const plan::Plan& plan, int frozen, int steps,
              double step_s) {
  RunSeries series;
  series.name = name;
  series.tokens_per_step = 100;
  for (int i = 0; i < steps; ++i) {
    StepEntry step;
    step.loss = 5.0 - i;
    step.step_s = step_s;
    step.frozen_layers = frozen;
    step.plan = plan;
    for (int layer = 0; layer < kLayers; ++layer) {
      const double backward = layer < frozen ? 0 : 1e-3;
      step.layers.push_back({.time = {1e-3, backward, backward}, .update_s = 0, .stash_bytes = {}});
    }
    series.steps.push_back(step);
  }
  return series;
}

TEST(Comparison, SpeedupIsThatOfTokensASecond) {
  const auto plan = plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B);
  const RunSeries slow = run("static", plan, 4, 10, 0.3);
  const RunSeries fast = run("balanced", plan, 4, 10, 0.2);
  const auto compared = compare(slow, fast, known(), kMicroBatches, 1, kRanks);
  ASSERT_TRUE(compared.has_value()) << compared.error().message;
  EXPECT_NEAR(compared->speedup, 1.5, 1e-12);
}

TEST(Comparison, BestIsTheSimulatedOptimumOverAllCuts) {
  const auto plan = plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B);
  const RunSeries series = run("static", plan, 4, 6, 0.3);
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
    const double time = plan::evaluate(cut, model, cluster, kMicroBatches)->step_time_s;
    best = std::min(best, time);
    if (first == 4) current = time;
  }
  EXPECT_NEAR(compared->best_speedup, current / best, 1e-9);
  EXPECT_GT(compared->best_speedup, 1.2);
}

TEST(Comparison, PredictionErrorCountsFromTheFirstMove) {
  const auto plan = plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B);
  RunSeries series = run("balanced", plan, 0, 4, 1.0);
  const std::vector<double> predicted = {0.1, 0.9, 0.8, 1.0};
  for (std::size_t i = 0; i < 4; ++i) series.steps[i].predicted_s = predicted[i];
  series.steps[1].moved = true;
  series.steps[1].balancing_s = 0.1;  // 0.9 without the move: predicted exactly
  const PredictionError error = prediction_error(series);
  EXPECT_EQ(error.steps, 3);
  EXPECT_NEAR(error.worst, 0.2, 1e-12);
  EXPECT_NEAR(error.median, 0.0, 1e-12);
}

TEST(Comparison, LossDigestSeesOneBit) {
  const auto plan = plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B);
  const RunSeries a = run("a", plan, 0, 4, 1.0);
  RunSeries b = a;
  EXPECT_EQ(loss_digest(a), loss_digest(b));
  b.steps[2].loss = std::nextafter(b.steps[2].loss, 10);
  EXPECT_NE(loss_digest(a), loss_digest(b));
}

}  // namespace
}  // namespace dynmo::train
