// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/step_stats.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <optional>
#include <vector>

namespace dynmo::control {
namespace {

std::vector<Rank> positions(std::initializer_list<int> values) {
  return {values.begin(), values.end()};
}

TEST(StepStats, AreThoseThatAllRanksAgreeOn) {
  const std::vector<RankFigures> ranks = {
      {.busy_s = 1, .overhead_s = 3, .plan_s = 1, .action_overhead_s = 2, .actions = 10},
      {.overhead_s = 2, .migrate_s = 5, .action_overhead_s = 4, .actions = 20, .message_s = 6},
      {.message_s = 8}};
  const StepStats stats = step_stats(ranks);
  EXPECT_EQ(stats.overhead.overhead_s, 2);  // of those who measured it
  EXPECT_EQ(stats.overhead.action_s, 6.0 / 30);
  EXPECT_EQ(stats.overhead.message_s, 7);
  EXPECT_EQ(stats.overhead.reduction_bytes_per_s, std::nullopt);
  EXPECT_EQ(stats.plan_s, 1);
  EXPECT_EQ(stats.migrate_s, 5);
  EXPECT_EQ(step_stats(std::vector<RankFigures>(2)), StepStats());
}

TEST(StepStats, ARankWithoutLayersIsNoImbalance) {
  const std::vector<double> busy_s = {1, 1, 0.5, 0};
  const auto schedule = schedule::ScheduleKind::k1F1B;
  EXPECT_DOUBLE_EQ(
      imbalance(busy_s, positions({0, 1, 2, 3}), plan::make_plan({4, 4, 4, 0}, schedule)),
      1 / (2.5 / 3) - 1);
  EXPECT_DOUBLE_EQ(
      imbalance(busy_s, positions({0, 1, 2, 3}), plan::make_plan({4, 4, 3, 1}, schedule)),
      1 / (2.5 / 4) - 1);
  // Two replicas of a pipeline of two ranks.
  EXPECT_DOUBLE_EQ(imbalance(busy_s, positions({0, 1, 0, 1}), plan::make_plan({4, 0}, schedule)),
                   1 / 0.75 - 1);
  EXPECT_EQ(imbalance(std::vector<double>(2), positions({0, 1}), plan::make_plan({1, 1}, schedule)),
            0);
}

TEST(StepStats, TheBubbleCountsAllRanks) {
  EXPECT_DOUBLE_EQ(bubble(std::vector<double>{1, 1, 0.5, 0}, 2), 1 - 2.5 / 4 / 2);
}

}  // namespace
}  // namespace dynmo::control
