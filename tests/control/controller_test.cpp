// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/controller.h"

#include <gtest/gtest.h>

#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "controller_training.h"
#include "dynmo/core/json.h"
#include "dynmo/plan/evaluate.h"
#include "tests/support/samples.h"

namespace dynmo::control::testing {
namespace {

TEST(Controller, NothingChangesSoNothingMoves) {
  Training training;
  training.run(200);
  EXPECT_TRUE(training.moves.empty());
  EXPECT_LE(training.plans, 2);
}

// A plan that no measurement made is a known change where steps were measured before the first one.
// Otherwise a window of seven steps outlives a burst.
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
    EXPECT_EQ(training.moves.front(), before == 0 ? 7 : 0);
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

// The remaining weights tell what products take, so pruning moves before the first step with it,
// and looks again when the step has been measured.
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
  const auto truth = evaluate(decision->plan, {training.costs, training.cluster, kMicroBatches});
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

// It moves once, as it would if it were told, and back once the rank is fast again.
TEST(Controller, MovesOnceForASlowRank) {
  for (const double speed : {0.7, 0.5}) {
    Training training(3);
    training.noise = 0.02;
    training.run(50);
    const double even_s = training.step_s;
    EXPECT_TRUE(training.moves.empty());
    training.slow = Rank(1);
    training.speed = speed;
    training.run(4);
    const auto decision = training.decide();
    ASSERT_TRUE(decision && decision->migrate) << "speed " << speed;
    training.observe();
    EXPECT_NEAR(decision->planned_step_s, training.step_s, 0.02 * training.step_s);
    const auto factor = decision->why.find(" take ");
    ASSERT_NE(factor, std::string::npos) << decision->why;
    EXPECT_NEAR(std::stod(decision->why.substr(factor + 6)), 1 / speed, 0.05) << decision->why;
    EXPECT_TRUE(decision->why.ends_with("since step 50")) << decision->why;
    const cost::Cluster real = training.real_cluster();
    const auto best = propose(plan::Balancer::kOptimal,
                              {{training.costs, real, kMicroBatches}, training.plan.schedule});
    EXPECT_LE(training.step_s, 1.01 * best->evaluation.step_time_s);
    training.run(100);
    EXPECT_EQ(training.moves.size(), 1U);
    training.slow.reset();
    training.run(100);
    EXPECT_EQ(training.moves.size(), 2U);
    EXPECT_NEAR(training.step_s, even_s, 1e-9);
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
      evaluate(training.plan, {training.costs, training.cluster, kMicroBatches})->step_time_s;
  training.scale(0, 6, 0.3);
  training.charges.move_fixed_s = 40 * before_s;  // a step gains about a quarter
  training.run(400);
  ASSERT_EQ(training.moves.size(), 1U);
  const double gain_s =
      evaluate(plan::make_plan({4, 4, 4, 4}, schedule::ScheduleKind::k1F1B),
               {training.costs, training.cluster, kMicroBatches})
          ->step_time_s -
      evaluate(training.plan, {training.costs, training.cluster, kMicroBatches})->step_time_s;
  const double waited_s = gain_s * static_cast<double>(training.moves.front() - 20);
  EXPECT_GT(gain_s, 0);
  EXPECT_LE(waited_s, 1.1 * training.charges.move_fixed_s);
}

// Work that drifts back and forth asks for plans that gain nothing: they have a budget.
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

// The first plan here takes as long as a thousand steps may spend on plans that lead to nothing.
TEST(Controller, AnExhaustedBudgetIsExceededWhereGrowthCostsMoreThanAPlan) {
  for (const double noise : {0.0, 0.02}) {
    Training still(3);
    still.noise = noise;
    still.charges.plan_s = 0.5;
    still.run(200);
    EXPECT_LE(still.plans, 1) << "noise " << noise;
    Training growing(3);
    growing.noise = noise;
    growing.charges.plan_s = 0.5;
    growing.run(20);
    ASSERT_EQ(growing.plans, 1) << "noise " << noise;
    for (int i = 0; i < 40; ++i) {
      growing.scale(0, 4, 1.02);
      growing.run(1);
    }
    EXPECT_FALSE(growing.moves.empty()) << "noise " << noise;
    EXPECT_LE(growing.plans, 6) << "noise " << noise;
  }
}

// Sources count that the work of some layers grows a little in every step: no noise of measuring
// hides it, and no look has to come.
TEST(Controller, AnswersCountedWorkWithoutMeasuringItAnew) {
  for (const double noise : {0.0, 0.1}) {
    Training training(5);
    training.noise = noise;
    training.counted = true;
    training.run(60);
    EXPECT_TRUE(training.moves.empty()) << "noise " << noise;
    const std::int64_t plans = training.plans;
    for (int i = 0; i < 3; ++i) {
      training.scale(0, 4, 1.2);
      training.run(1);
    }
    training.run(1);
    ASSERT_FALSE(training.moves.empty()) << "noise " << noise;
    EXPECT_LE(training.moves.front(), 63) << "noise " << noise;
    EXPECT_GT(training.plans, plans);
  }
}

// Counts that jitter around a mean are no growth that pays.
TEST(Controller, CountedWorkThatJittersMovesLittle) {
  Training training(6);
  training.counted = true;
  training.charges.move_fixed_s = 0.02;
  Rng rng(7);
  const cost::ModelCost mean = training.costs;
  for (int step = 0; step < 200; ++step) {
    training.costs = mean;
    for (int i = 0; i < 16; ++i) training.scale(i, 1, 1 + 0.05 * rng.normal());
    training.run(1);
  }
  EXPECT_LE(training.moves.size(), 3U);
  EXPECT_LE(training.plans, 60);
}

// An observation stands for as many steps as it says: a loss is the loss of all of them.
TEST(Controller, AnObservationStandsForTheStepsThatItSays) {
  std::vector<std::int64_t> moved;
  for (const std::int64_t every : {1, 10}) {
    Training training;
    training.every = every;
    training.run(200 / every);
    training.scale(0, 6, 0.3);
    training.charges.move_fixed_s = 5;
    training.run(600 / every);
    ASSERT_EQ(training.moves.size(), 1U) << every;
    moved.push_back(training.moves.front() - 200);
  }
  EXPECT_NEAR(static_cast<double>(moved[1]), static_cast<double>(moved[0]), 20);
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
// Replaces it by one that reads what it has written.
void hand_on(Controller& controller) {
  const std::string text = controller.state().dump();
  const auto read = parse_json(text, "state");
  ASSERT_TRUE(read) << read.error().message;
  Controller other(equal_layers(16), {.micro_batches = kMicroBatches, .steps = 1000});
  const auto restored = other.restore(*read);
  ASSERT_TRUE(restored) << restored.error().message;
  EXPECT_EQ(other.state().dump(), text);
  controller = std::move(other);
}

// A controller that was written down and read again in the middle of a run is the same one, in
// trainings of all kinds of changes.
TEST(Controller, ItsStateReadAgainDecidesAsItWould) {
  std::int64_t plans = 0;
  for (std::uint64_t seed = 1; seed <= samples(10U); ++seed) {
    Training whole(seed);
    Training handed_on(seed);
    for (Training* training : {&whole, &handed_on}) {
      training->noise = 0.05;
      training->charges.move_fixed_s = seed % 2 == 0 ? 0.05 : 1e-4;
    }
    for (std::int64_t step = 0; step < 120; ++step) {
      for (Training* training : {&whole, &handed_on}) {
        training->burst = step % 40 < 3 ? std::optional(Rank(1)) : std::nullopt;
        if (step % 30 == 20) training->scale(static_cast<int>(seed % 12), 4, 1.7);
        if (step % 60 == 50) training->controller.announce(cost::Announced::kWork, step);
        if (step == 70) training->costs.layers[0].frozen = training->costs.layers[1].frozen = true;
        if (step == 70) training->controller.announce(cost::Announced::kKnown, step);
      }
      if (step % 7 == 0) hand_on(handed_on.controller);
      const auto decided = whole.decide();
      const auto again = handed_on.decide();
      ASSERT_EQ(decided.has_value(), again.has_value()) << "seed " << seed << ", step " << step;
      if (decided) {
        EXPECT_EQ(decided->reason, again->reason);
        EXPECT_EQ(decided->why, again->why);
      }
      whole.observe();
      handed_on.observe();
    }
    EXPECT_EQ(whole.plan, handed_on.plan) << "seed " << seed;
    plans += whole.plans;
  }
  EXPECT_GT(plans, samples(50));
}

TEST(Controller, AStateThatIsNoneIsRefused) {
  Training training;
  training.run(10);
  const Json good = training.controller.state();
  const auto error = [&](const Json& state) {
    Controller other(equal_layers(16), {.micro_batches = kMicroBatches, .steps = 1000});
    const auto restored = other.restore(state);
    return restored ? std::string() : restored.error().message;
  };
  EXPECT_EQ(error(good), "");
  EXPECT_NE(error(Json()), "");
  EXPECT_NE(error(Json::object()), "");
  for (const auto& [key, value] : good.items()) {
    Json without = good;
    without.erase(key);
    EXPECT_NE(error(without), "") << key;
    Json other = good;
    other[key] = "text";
    EXPECT_NE(error(other), "") << key;
  }
  Json fewer = good;
  fewer["profiler"]["window"][0]["owners"].erase(0);
  EXPECT_EQ(error(fewer), "state of the profiler: not of 16 layers");
}

}  // namespace
}  // namespace dynmo::control::testing
