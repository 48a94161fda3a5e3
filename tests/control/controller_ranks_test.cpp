// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "controller_training.h"
#include "dynmo/control/controller.h"
#include "dynmo/plan/pack.h"
#include "dynmo/plan/propose.h"

namespace dynmo::control::testing {
namespace {

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

// The second of four ranks is lost.
Expected<AfterLoss> lose_one(Training& training) {
  training.controller.ranks_changed(numbers({0, 2, 3}));
  training.cluster.ranks.pop_back();
  return training.controller.after_loss({.plan = training.plan,
                                         .step = training.step,
                                         .known = training.costs,
                                         .cluster = training.cluster});
}

TEST(Controller, PlansForTheRanksThatAreLeftAfterALoss) {
  Training training;
  training.scale(0, 4, 3);
  training.run(20);
  const plan::Plan before = training.plan;
  const auto after = lose_one(training);
  ASSERT_TRUE(after) << after.error().message;
  EXPECT_EQ(after->fault, "");
  const Decision& decision = after->decision;
  EXPECT_TRUE(decision.migrate);
  EXPECT_EQ(decision.why, "ranks were lost");
  EXPECT_EQ(decision.plan.ranks, 3);
  EXPECT_EQ(decision.plan.generation, before.generation + 1);
  EXPECT_TRUE(plan::validate(decision.plan, 16));
  EXPECT_EQ(decision.ranks_before, 4);
  EXPECT_EQ(decision.ranks_after, 3);
  const auto best =
      plan::propose(plan::Balancer::kOptimal, {{training.costs, training.cluster, kMicroBatches}});
  EXPECT_NEAR(decision.planned_step_s, best->evaluation.step_time_s, 1e-9);
  // It is no change of the work: there is nothing to plan for again.
  training.plan = decision.plan;
  EXPECT_FALSE(training.decide());
}

TEST(Controller, LooksForABetterPlanAfterAQuickOne) {
  Training training;
  training.controller = Controller(
      training.costs,
      {.policy = {.rank_use = RankUse::kFewest}, .micro_batches = kMicroBatches, .steps = 1000});
  training.run(20);
  const auto after = lose_one(training);
  ASSERT_TRUE(after) << after.error().message;
  training.plan = after->decision.plan;
  EXPECT_TRUE(training.decide());
}

TEST(Controller, CutsEvenlyAfterALossIfNothingElseIsPossible) {
  Training unmeasured;
  auto after = lose_one(unmeasured);
  ASSERT_TRUE(after) << after.error().message;
  EXPECT_EQ(after->fault, "");
  EXPECT_EQ(after->decision.plan,
            plan::make_plan({6, 5, 5}, schedule::ScheduleKind::k1F1B, /*generation=*/1));

  Training full;
  full.run(20);
  for (cost::ClusterRank& rank : full.cluster.ranks) rank.memory = Bytes{10};
  after = lose_one(full);
  ASSERT_TRUE(after) << after.error().message;
  EXPECT_NE(after->fault, "");
  EXPECT_EQ(after->decision.plan.stages,
            plan::make_plan({6, 5, 5}, schedule::ScheduleKind::k1F1B).stages);
}

}  // namespace
}  // namespace dynmo::control::testing
