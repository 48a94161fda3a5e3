// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/controller.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "dynmo/core/rng.h"
#include "dynmo/plan/evaluate.h"
#include "tests/support/samples.h"

namespace dynmo::control {
namespace {

constexpr int kMicroBatches = 8;

cost::ModelCost equal_layers(int count) {
  cost::ModelCost model;
  for (int i = 0; i < count; ++i) {
    cost::LayerCost& layer = model.layers.emplace_back();
    layer.name = fmt::format("layer{}", i);
    layer.forward_s = layer.backward_input_s = layer.backward_weight_s = 1e-3;
    layer.parameter_bytes = Bytes{1000};
    layer.optimizer_bytes = Bytes{2000};
  }
  return model;
}

// A training of equal layers on 4 ranks, whose layers change as a test says.
struct Training {
  explicit Training(std::uint64_t noise_seed = 1) : rng(noise_seed) {}

  void scale(int first, int count, double factor) {
    for (int i = first; i < first + count; ++i) {
      cost::LayerCost& layer = costs.layers[static_cast<std::size_t>(i)];
      layer.forward_s *= factor;
      layer.backward_input_s *= factor;
      layer.backward_weight_s *= factor;
    }
  }

  std::optional<Decision> decide() {
    auto decision =
        controller.decide({.plan = plan, .step = step, .known = costs, .cluster = cluster});
    EXPECT_TRUE(decision) << decision.error().message;
    if (*decision) ++plans;
    if (*decision && (*decision)->migrate) {
      plan = (*decision)->plan;
      moves.push_back(step);
    }
    return *decision;
  }

  void observe() {
    cost::Observation seen{.layers = {}, .charges = charges};
    for (std::int32_t i = 0; i < costs.size(); ++i) {
      const cost::LayerCost& layer = costs.layers[LayerId(i).index()];
      const double rank = plan.owner(LayerId(i)) == burst ? 2 : 1;
      const double factor = rank * std::max(0.1, 1 + noise * rng.normal());
      seen.layers.push_back(cost::sample_of(layer, factor));
    }
    controller.observe(seen, plan, costs.frozen_layers());
    trained_s += evaluate(plan, costs, cluster, kMicroBatches)->step_time_s;
    ++step;
  }

  void run(std::int64_t steps) {
    for (std::int64_t i = 0; i < steps; ++i) {
      decide();
      observe();
    }
  }

  Rng rng;
  cost::ModelCost costs = equal_layers(16);
  cost::Cluster cluster = cost::equal_ranks(4);
  plan::Plan plan = plan::make_plan({4, 4, 4, 4}, schedule::ScheduleKind::k1F1B);
  cost::Charges charges = {.plan_s = 1e-4, .move_fixed_s = 1e-4, .bytes_per_s = 1e9};
  Controller controller{costs, {.micro_batches = kMicroBatches, .steps = 1000}};
  double noise = 0;
  std::optional<Rank> burst;
  std::int64_t step = 0;
  std::int64_t plans = 0;
  double trained_s = 0;
  std::vector<std::int64_t> moves;
};

TEST(Controller, NothingChangesSoNothingMoves) {
  Training training;
  training.run(200);
  EXPECT_TRUE(training.moves.empty());
  EXPECT_LE(training.plans, 2);
}

// A window of seven steps outlives a burst, wherever they were measured: a run that begins with a
// poor cut does not wait for as many steps again.
TEST(Controller, StepsMeasuredBeforeTheFirstOneCount) {
  for (const int before : {0, 4}) {
    Training training;
    training.scale(0, 4, 3);
    Profiler measured(training.costs, 5);
    std::vector<cost::LayerSample> layers;
    for (const cost::LayerCost& layer : training.costs.layers) {
      layers.push_back(cost::sample_of(layer));
    }
    for (int i = 0; i < before; ++i) measured.add(layers, plan::owners(training.plan));
    training.controller.use(measured);
    training.run(20);
    ASSERT_FALSE(training.moves.empty()) << before;
    EXPECT_EQ(training.moves.front(), 7 - before);
  }
}

// New costs follow from what froze, so it moves before the first step with them.
TEST(Controller, AnswersFrozenLayersAtTheBoundary) {
  Training training;
  training.run(20);
  for (int i = 0; i < 6; ++i) training.costs.layers[static_cast<std::size_t>(i)].frozen = true;
  training.controller.announce(cost::Announced::kKnown, training.step);
  const auto decision = training.decide();
  ASSERT_TRUE(decision && decision->migrate);
  EXPECT_EQ(training.moves, std::vector<std::int64_t>{20});
  EXPECT_EQ(decision->why, "the work has changed");
}

TEST(Controller, AnswersAnnouncedWorkOnceItWasMeasured) {
  Training training;
  training.noise = 0.01;
  training.run(20);
  training.scale(0, 4, 0.1);
  training.controller.announce(cost::Announced::kWork, training.step);
  EXPECT_FALSE(training.decide()) << "what it costs is not known yet";
  training.observe();
  const auto decision = training.decide();
  ASSERT_TRUE(decision && decision->migrate) << (decision ? decision->reason : "no plan");
  // Measured for three steps more, it is looked at again.
  const std::int64_t plans = training.plans;
  training.observe();
  training.run(3);
  EXPECT_EQ(training.plans, plans + 1);
}

// What pruning leaves says what products take, so it moves before the first step with it, and looks
// again when the step has been measured.
TEST(Controller, AnswersPrunedLayersAtTheBoundary) {
  Training training;
  training.noise = 0.01;
  training.run(20);
  training.scale(0, 4, 0.1);
  for (std::size_t i = 0; i < 4; ++i) training.costs.layers[i].product_time = 0.1;
  training.controller.know(training.costs);
  training.controller.announce(cost::Announced::kPredicted, training.step);
  const auto decision = training.decide();
  ASSERT_TRUE(decision && decision->migrate) << (decision ? decision->reason : "no plan");
  const auto truth = evaluate(decision->plan, training.costs, training.cluster, kMicroBatches);
  EXPECT_NEAR(decision->planned_step_s / truth->step_time_s, 1, 0.03);
  const std::int64_t plans = training.plans;
  training.observe();
  training.run(3);
  EXPECT_EQ(training.plans, plans + 1) << "measured, it is looked at again";
}

// A prediction that was wrong is put right by the measurements.
TEST(Controller, PutsAWrongPredictionRight) {
  Training training;
  training.noise = 0.01;
  training.run(20);
  const plan::Plan even = training.plan;
  for (std::size_t i = 0; i < 4; ++i) training.costs.layers[i].product_time = 0.1;
  training.controller.know(training.costs);
  training.controller.announce(cost::Announced::kPredicted, training.step);
  training.run(10);
  ASSERT_EQ(training.moves.size(), 2U);
  EXPECT_EQ(training.plan.stages, even.stages);
}

TEST(Controller, FindsWhatNobodyAnnouncesWithinFiveSteps) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    Training training(seed);
    training.noise = 0.02;
    training.run(30);
    training.scale(0, 6, 0.3);
    training.run(6);
    ASSERT_FALSE(training.moves.empty()) << "seed " << seed;
    EXPECT_LE(training.moves.front() - 30, 5) << "seed " << seed;
  }
}

TEST(Controller, ABurstOfThreeStepsMovesNothing) {
  for (std::uint64_t seed = 1; seed <= samples(50U); ++seed) {
    Training training(seed);
    training.noise = 0.02;
    training.run(30);
    training.burst = Rank(static_cast<std::int32_t>(seed % 4));
    training.run(3);
    training.burst.reset();
    training.run(60);
    EXPECT_TRUE(training.moves.empty()) << "seed " << seed << ", step " << training.moves.front();
  }
}

TEST(Controller, NoiseAloneMovesNothing) {
  std::size_t moves = 0;
  for (std::uint64_t seed = 1; seed <= samples(20U); ++seed) {
    Training training(seed);
    training.noise = 0.05;
    training.run(400);
    moves += training.moves.size();
  }
  EXPECT_LE(moves, 1U) << "of " << samples(8000) << " steps";
}

// Rent or buy: not knowing how long the gain lasts, it moves when it has paid for the move once, so
// it loses at most as much again as it had to.
TEST(Controller, ADearMoveIsMadeOnceItsCostWasForgone) {
  Training training;
  training.run(20);
  const double before_s =
      evaluate(training.plan, training.costs, training.cluster, kMicroBatches)->step_time_s;
  training.scale(0, 6, 0.3);
  training.charges.move_fixed_s = 40 * before_s;  // a step gains about a quarter
  training.run(400);
  ASSERT_EQ(training.moves.size(), 1U);
  const double gain_s =
      evaluate(plan::make_plan({4, 4, 4, 4}, schedule::ScheduleKind::k1F1B), training.costs,
               training.cluster, kMicroBatches)
          ->step_time_s -
      evaluate(training.plan, training.costs, training.cluster, kMicroBatches)->step_time_s;
  const double waited_s = gain_s * static_cast<double>(training.moves.front() - 20);
  EXPECT_GT(gain_s, 0);
  EXPECT_LE(waited_s, 1.1 * training.charges.move_fixed_s);
}

// Work that drifts to and fro asks for plans that gain nothing: they have a budget.
TEST(Controller, PlansThatLeadToNothingHaveABudget) {
  Training training;
  training.charges.plan_s = 0.05;  // a step takes 0.13 s
  for (int i = 0; i < 100; ++i) {
    training.scale(i % 16, 1, i / 16 % 2 == 0 ? 1.1 : 1 / 1.1);
    training.run(5);
  }
  EXPECT_LE(
      static_cast<double>(training.plans - std::ssize(training.moves)) * training.charges.plan_s,
      0.005 * training.trained_s + 2 * training.charges.plan_s);
}

TEST(Controller, AMoveThatDidNotHappenIsAPlanThatLedToNothing) {
  Training training;
  training.run(20);
  for (int i = 0; i < 6; ++i) training.costs.layers[static_cast<std::size_t>(i)].frozen = true;
  training.controller.announce(cost::Announced::kKnown, training.step);
  const plan::Plan before = training.plan;
  ASSERT_TRUE(training.decide()->migrate);
  training.controller.not_moved();
  training.plan = before;
  // It is asked for again, as drift from what the plan was made for.
  training.observe();
  training.run(20);
  EXPECT_EQ(training.moves.size(), 2U);
  EXPECT_NE(training.plan.stages, before.stages);
}

TEST(Controller, RanksFedAlikeDecideAlike) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    Training one(seed);
    Training two(seed);
    for (Training* training : {&one, &two}) {
      training->noise = 0.03;
      training->run(30);
      training->scale(3, 5, 0.4);
      training->run(50);
    }
    EXPECT_EQ(one.moves, two.moves) << "seed " << seed;
    EXPECT_EQ(one.plan, two.plan) << "seed " << seed;
  }
}

// Memory, cluster and replicas as they were measured.
TEST(Controller, AClusterIsAsMeasured) {
  const cost::Cluster plain = as_measured(cost::equal_ranks(2), {}, 3, 2);
  EXPECT_EQ(plain, cost::equal_ranks(2));
  const cost::Cluster cluster = as_measured(
      cost::equal_ranks(2),
      {.overhead_s = {}, .action_s = 1e-6, .message_s = 2e-6, .reduction_bytes_per_s = 1e9}, 3, 2);
  EXPECT_EQ(cluster.action_s, 1e-6);
  EXPECT_EQ(cluster.inside_node.latency_s, 2e-6);
  EXPECT_EQ(cluster.replicas, 3);
  EXPECT_EQ(cluster.between_replicas.bandwidth_bytes_per_s, 2e9);
}

}  // namespace
}  // namespace dynmo::control
