// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/step_stats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "dynmo/core/files.h"
#include "dynmo/core/json.h"

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

// tests/python/decisions_test.py feeds the same steps to dynmo.torch.
TEST(StepStats, FiguresOfSteps) {
  const auto text = read_file(DYNMO_FIGURES);
  ASSERT_TRUE(text) << text.error().message;
  std::istringstream lines(*text);
  int compared = 0;
  for (std::string line; std::getline(lines, line); ++compared) {
    SCOPED_TRACE(line);
    const Json step = Json::parse(line);
    const auto counts = step.at("layers_of_ranks").get<std::vector<int>>();
    const auto busy_s = step.at("busy_s").get<std::vector<double>>();
    const auto migrate_s = step.at("migrate_s").get<std::vector<double>>();
    std::vector<Rank> positions;
    std::vector<RankFigures> ranks;
    for (std::size_t rank = 0; rank < busy_s.size(); ++rank) {
      positions.emplace_back(static_cast<int>(rank % counts.size()));
      ranks.push_back({.busy_s = busy_s[rank], .migrate_s = migrate_s.at(rank)});
    }
    const plan::Plan plan = plan::make_plan(counts, schedule::ScheduleKind::k1F1B);
    EXPECT_DOUBLE_EQ(imbalance(busy_s, positions, plan), step.at("imbalance"));
    EXPECT_DOUBLE_EQ(bubble(busy_s, step.at("step_s")), step.at("bubble"));
    EXPECT_EQ(step_stats(ranks).migrate_s, std::ranges::max(migrate_s));
  }
  EXPECT_EQ(compared, 4);
}

TEST(StepStats, RanksThatWereNotBusyAreBalanced) {
  EXPECT_EQ(imbalance(std::vector<double>(2), positions({0, 1}),
                      plan::make_plan({1, 1}, schedule::ScheduleKind::k1F1B)),
            0);
}

}  // namespace
}  // namespace dynmo::control
