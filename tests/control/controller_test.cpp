// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/controller.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/json.h"
#include "dynmo/core/rng.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/pack.h"
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
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
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
  EXPECT_GT(plans, 50);
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

std::vector<std::optional<Rank>> numbers(const std::vector<int>& before) {
  std::vector<std::optional<Rank>> ranks;
  for (const int rank : before) {
    ranks.push_back(rank < 0 ? std::nullopt : std::optional(Rank(rank)));
  }
  return ranks;
}

// Two more ranks than there were, at the end.
void join_two(Training& training) {
  training.controller.ranks_changed(numbers({0, 1, 2, 3, -1, -1}));
  training.cluster = cost::equal_ranks(6);
  training.plan.ranks = 6;
}

TEST(Controller, RanksThatComeGetLayersAtTheBoundary) {
  Training training;
  training.run(20);
  ASSERT_TRUE(training.moves.empty());
  join_two(training);
  const auto decision = training.decide();
  ASSERT_TRUE(decision && decision->migrate);
  EXPECT_EQ(decision->why, "ranks have come or gone");
  EXPECT_EQ(decision->ranks_after, 6);
  EXPECT_LT(decision->planned_step_s, decision->current_step_s);
}

// Cost and horizon hold for them, too: near the end of the run the move does not pay any more, and
// where it is expensive it waits until that has been lost.
TEST(Controller, RanksThatComeWaitWhereTheMoveDoesNotPay) {
  Training late;
  late.run(995);
  late.charges.move_fixed_s = 0.2;
  late.run(1);
  join_two(late);
  const auto decision = late.decide();
  ASSERT_TRUE(decision);
  EXPECT_FALSE(decision->migrate) << decision->reason;
  EXPECT_TRUE(decision->too_expensive) << decision->reason;

  Training expensive;
  expensive.charges.move_fixed_s = 5;  // 100 steps gain half of it
  expensive.run(20);
  join_two(expensive);
  expensive.run(400);
  ASSERT_EQ(expensive.moves.size(), 1U);
  EXPECT_GT(expensive.moves[0], 100);
}

// One layer takes as long as the others of a rank together, so that more ranks gain little.
TEST(Controller, NoiseKeepsRanksThatComeWaiting) {
  for (const double noise : {0.0, 0.2}) {
    Training training;
    training.scale(15, 1, 4.8);
    training.plan = plan::make_plan({5, 5, 5, 1}, schedule::ScheduleKind::k1F1B);
    training.noise = noise;
    training.run(6);
    join_two(training);
    const auto decision = training.decide();
    ASSERT_TRUE(decision);
    EXPECT_EQ(decision->migrate, noise == 0) << decision->reason;
    EXPECT_EQ(decision->within_noise, noise > 0) << decision->reason;
  }
}

TEST(Controller, VacatesWhatLeavesWhateverItCosts) {
  Training training;
  const auto vacate = [&](const std::vector<Rank>& kept) {
    return training.controller.vacate({.plan = training.plan,
                                       .step = training.step,
                                       .known = training.costs,
                                       .cluster = training.cluster},
                                      kept);
  };
  EXPECT_EQ(vacate({Rank(0)}).error().code, ErrorCode::kBadInput) << "nothing was measured";
  training.charges.move_fixed_s = 1000;
  training.run(20);
  const auto decision = vacate({Rank(0), Rank(2), Rank(3)});
  ASSERT_TRUE(decision) << decision.error().message;
  EXPECT_TRUE(decision->migrate);
  EXPECT_EQ(decision->why, "ranks have come or gone");
  EXPECT_TRUE(decision->plan.stages_of(Rank(1)).empty());
  EXPECT_GT(decision->planned_step_s, decision->current_step_s);
  EXPECT_EQ(decision->ranks_after, 3);
  training.plan = plan::without_others(decision->plan, {Rank(0), Rank(2), Rank(3)});
  training.controller.ranks_changed(numbers({0, 2, 3}));
  training.cluster = cost::equal_ranks(3);
  EXPECT_FALSE(training.decide()) << "that was the decision";
  training.run(100);
  EXPECT_TRUE(training.moves.empty());
  training.cluster = cost::equal_ranks(3, Bytes{1000});
  EXPECT_EQ(vacate({Rank(0)}).error().code, ErrorCode::kInfeasible);
}

// Measurements from before ranks came or went count: a change is found as soon as without.
TEST(Controller, FindsChangesAcrossAChangeOfRanks) {
  for (const bool changes : {false, true}) {
    Training training;
    training.noise = 0.02;
    training.run(30);
    if (changes) join_two(training);
    if (changes) training.run(1);
    const std::int64_t moved = std::ssize(training.moves);
    const int first = training.plan.stages[1].layers.first.value;
    const std::int64_t changed = training.step;
    training.scale(first, 1, 4);
    training.run(5);
    ASSERT_GT(std::ssize(training.moves), moved) << changes;
    EXPECT_LE(training.moves.back(), changed + 5) << changes;
  }
}

TEST(Controller, ReleasesRanksThatHaveBeenIdleForLong) {
  Controller controller(equal_layers(16),
                        {.micro_batches = kMicroBatches, .release_after = 3, .min_ranks = 2});
  const auto kind = schedule::ScheduleKind::k1F1B;
  const plan::Plan all = plan::make_plan({4, 4, 4, 4}, kind);
  const plan::Plan packed = plan::make_plan({8, 8, 0, 0}, kind);
  for (std::int64_t step = 1; step <= 10; ++step) EXPECT_FALSE(controller.release(all, step));
  for (std::int64_t step = 11; step <= 13; ++step) EXPECT_FALSE(controller.release(packed, step));
  // Other ranks idle than before: they wait anew.
  const plan::Plan other = plan::make_plan({6, 5, 5, 0}, kind);
  for (std::int64_t step = 14; step <= 16; ++step) EXPECT_FALSE(controller.release(other, step));
  const auto released = controller.release(other, 17);
  ASSERT_TRUE(released);
  EXPECT_EQ(released->kept, (std::vector{Rank(0), Rank(1), Rank(2)}));
  EXPECT_EQ(released->idle_steps, 3);
  EXPECT_FALSE(controller.release(other, 18)) << "it was refused, and waits as long again";
  EXPECT_FALSE(controller.release(other, 19));
  EXPECT_TRUE(controller.release(other, 20));
  // The first rank stays, and as many as min_ranks says.
  const plan::Plan last = plan::make_plan({0, 0, 0, 16}, kind);
  EXPECT_FALSE(controller.release(last, 21));
  EXPECT_EQ(controller.release(last, 24)->kept, (std::vector{Rank(0), Rank(3)}));
  const plan::Plan first = plan::make_plan({16, 0, 0, 0}, kind);
  EXPECT_FALSE(controller.release(first, 25));
  EXPECT_EQ(controller.release(first, 28)->kept, (std::vector{Rank(0), Rank(1)}));
}

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
