// SPDX-License-Identifier: Apache-2.0
#include "dynmo/sim/step_timer.h"

#include <gtest/gtest.h>

#include <utility>

#include "dynmo/schedule/text.h"
#include "tests/sim/problems.h"
#include "tests/support/samples.h"

namespace dynmo::sim {
namespace {

using testing::cluster_of;
using testing::equal_costs;
using testing::Problem;
using testing::random_problem;

// One timer, many costs: with links, reductions, overhead of actions, and messages that queue.
TEST(StepTimer, TakesTheTimeOfTheSimulatorToTheNanosecond) {
  for (std::uint64_t seed = 0; seed < samples(1000U); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mix_key({71, seed}));
    Problem problem = random_problem(rng, seed % 2 == 1);
    auto timer = StepTimer::make(problem.schedule);
    ASSERT_TRUE(timer) << timer.error().message;
    for (int i = 0; i < 4; ++i) {
      if (i == 1) problem.cluster.action_s = 2e-6 * rng.uniform();
      if (i == 3) problem.cluster.nic_bandwidth_bytes_per_s = 1e9;
      for (StageCost& cost : problem.costs) std::swap(cost.forward, cost.input_gradient);
      problem.costs.front().update += Nanoseconds{i};
      const auto time = timer->step_time(problem.costs, problem.cluster);
      ASSERT_TRUE(time) << time.error().message;
      ASSERT_EQ(*time, simulate(problem.schedule, problem.costs, problem.cluster)->step_time)
          << to_grid(problem.schedule);
    }
  }
}

TEST(StepTimer, RefusesWhatTheSimulatorRefuses) {
  const schedule::Schedule good =
      testing::lowered(schedule::ScheduleKind::k1F1B, testing::even_shape(2, 2));
  schedule::Schedule stuck = good;
  stuck.ranks = {{}, {}};
  for (const char* text :
       {"0F0", "0SEND_F0", "0RECV_B0", "0B0", "0F1", "0SEND_F1", "0RECV_B1", "0B1"}) {
    stuck.ranks[0].push_back(*schedule::parse_action(text));
  }
  for (const char* text :
       {"1RECV_F0", "1RECV_F1", "1F0", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"}) {
    stuck.ranks[1].push_back(*schedule::parse_action(text));
  }
  schedule::Schedule torn = good;
  torn.ranks[0].pop_back();
  for (const schedule::Schedule& schedule : {stuck, torn}) {
    const auto timer = StepTimer::make(schedule);
    ASSERT_FALSE(timer);
    EXPECT_EQ(timer.error().message,
              simulate(schedule, equal_costs(2, 1, 1, 1), cluster_of(2)).error().message);
  }
  auto timer = StepTimer::make(good);
  ASSERT_TRUE(timer) << timer.error().message;
  std::vector<StageCost> costs = equal_costs(2, 1, 1, 1);
  EXPECT_FALSE(timer->step_time(costs, cluster_of(3)));
  costs[1].forward = Nanoseconds{-1};
  EXPECT_FALSE(timer->step_time(costs, cluster_of(2)));
}

}  // namespace
}  // namespace dynmo::sim
