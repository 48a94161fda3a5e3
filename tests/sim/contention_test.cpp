// SPDX-License-Identifier: Apache-2.0
// Messages that queue for the network cards of nodes.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "dynmo/schedule/text.h"
#include "tests/sim/problems.h"
#include "tests/sim/time_steps.h"
#include "tests/support/samples.h"

namespace dynmo::sim {
namespace {

using schedule::ActionKind;
using schedule::ScheduleKind;
using schedule::testing::even_shape;
using schedule::testing::pick;
using testing::Problem;
using testing::TimeSteps;

// Times of a few nanoseconds, so that many fall together, on one to three nodes.
Problem random_small_problem(Rng& rng) {
  Problem problem = testing::random_problem(rng, pick(rng, 0, 2) > 0);
  const auto time = [&] { return Nanoseconds{pick(rng, 0, 2) == 0 ? 0 : pick(rng, 0, 9)}; };
  for (StageCost& cost : problem.costs) {
    cost.forward = time();
    cost.input_gradient = time();
    cost.weight_gradient = time();
    cost.update = time();
    cost.reduction = time();
    cost.boundary = Bytes{pick(rng, 0, 12)};
  }
  constexpr double kSpeeds[] = {1, 1, 0.5, 2};
  constexpr int kNodes[] = {0, 4, 9};
  const int nodes = pick(rng, 1, 3);
  for (cost::ClusterRank& rank : problem.cluster.ranks) {
    rank.speed = kSpeeds[pick(rng, 0, 3)];
    rank.node = kNodes[pick(rng, 0, nodes - 1)];
  }
  const auto link = [&] {
    return cost::Link{.latency_s = 1e-9 * pick(rng, 0, 4),
                      .bandwidth_bytes_per_s = 1e9 * pick(rng, 1, 3)};
  };
  problem.cluster.inside_node = link();
  problem.cluster.between_nodes = link();
  if (pick(rng, 0, 4) > 0) problem.cluster.nic_bandwidth_bytes_per_s = 0.5e9 * pick(rng, 1, 6);
  return problem;
}

TEST(Contention, MatchesALookAtEveryNanosecond) {
  for (std::uint64_t seed = 0; seed < samples(3000U); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mix_key({61, seed}));
    const Problem problem = random_small_problem(rng);
    const auto result =
        simulate(problem.schedule, problem.costs, problem.cluster, {.timeline = true});
    ASSERT_TRUE(result) << result.error().message;
    TimeSteps oracle(problem);
    ASSERT_EQ(result->step_time.count(), oracle.step_time()) << to_grid(problem.schedule);
    for (const auto& spans : result->timeline.ranks) {
      for (const schedule::TimedAction& span : spans) {
        if (!is_compute(span.action.kind)) continue;
        ASSERT_EQ(span.end.count(), oracle.ends().at(to_string(span.action)));
      }
    }
  }
}

TEST(Contention, AWideCardChangesNothing) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Rng rng(mix_key({62, seed}));
    Problem problem = testing::random_problem(rng, true);
    const auto free = simulate(problem.schedule, problem.costs, problem.cluster);
    problem.cluster.nic_bandwidth_bytes_per_s = 1e300;
    const auto wide = simulate(problem.schedule, problem.costs, problem.cluster);
    ASSERT_EQ(free->step_time, wide->step_time) << "seed " << seed;
    problem.cluster.nic_bandwidth_bytes_per_s = 1e8;
    const auto narrow = simulate(problem.schedule, problem.costs, problem.cluster);
    ASSERT_LE(free->step_time, narrow->step_time) << "seed " << seed;
  }
}

// Arrivals of all messages, by the text of their receive.
std::map<std::string, std::int64_t> arrivals(const SimResult& result) {
  std::map<std::string, std::int64_t> times;
  for (const auto& spans : result.timeline.ranks) {
    for (const schedule::TimedAction& span : spans) {
      const bool receive = span.action.kind == ActionKind::kReceiveActivation ||
                           span.action.kind == ActionKind::kReceiveGradient;
      if (receive) times[to_string(span.action)] = span.end.count();
    }
  }
  return times;
}

// When the message of 100 bytes from stage 0, done at 10 ns, arrives on another node.
std::int64_t arrival_with_card(double bandwidth) {
  std::vector<StageCost> costs = testing::equal_costs(2, 10, 0, 0);
  costs[0].boundary = Bytes{100};
  cost::Cluster cluster = cost::equal_nodes(2, 1);
  cluster.between_nodes = {.latency_s = 3e-9, .bandwidth_bytes_per_s = 10e9};
  cluster.nic_bandwidth_bytes_per_s = bandwidth;
  const auto result = simulate(testing::lowered(ScheduleKind::kGpipe, even_shape(2, 1, 2)), costs,
                               cluster, {.timeline = true});
  return arrivals(*result).at("1RECV_F0");
}

TEST(Contention, TheCardIsALimitToEachMessage) {
  EXPECT_EQ(arrival_with_card(1e300), 10 + 3 + 10) << "the link's 10 bytes a nanosecond";
  EXPECT_EQ(arrival_with_card(20e9), 10 + 3 + 10);
  EXPECT_EQ(arrival_with_card(5e9), 10 + 3 + 20);
}

// Stages 0 and 2 on node 0 send 30 bytes a micro-batch to stages 1 and 3 on node 1.
TEST(Contention, MessagesOfOneNodeWaitForEachOther) {
  schedule::PipelineShape shape{.ranks = 4, .micro_batches = 3, .stages = {}};
  for (const int rank : {0, 2, 1, 3}) shape.stages.push_back({.rank = Rank{rank}, .frozen = true});
  std::vector<StageCost> costs = testing::equal_costs(4, 10, 0, 0);
  costs[0].boundary = costs[2].boundary = Bytes{30};
  cost::Cluster cluster = cost::equal_nodes(2, 2);
  const schedule::Schedule schedule = testing::lowered(ScheduleKind::kGpipe, shape);
  const auto times = [&](double card) {
    cluster.nic_bandwidth_bytes_per_s = card;
    return arrivals(*simulate(schedule, costs, cluster, {.timeline = true}));
  };
  const auto free = times(1e300);
  EXPECT_EQ(free.at("1RECV_F2"), 30);
  EXPECT_EQ(free.at("3RECV_F0"), 30);
  // 30 ns on the card each. Posted at 10, 20 and, when stage 1 has run F0 and posts the receive,
  // 50; stage 2's first follows at 60, when the third of stage 0 still waits for the second.
  const auto shared = times(1e9);
  EXPECT_EQ(shared.at("1RECV_F0"), 40);
  EXPECT_EQ(shared.at("1RECV_F1"), 70);
  EXPECT_EQ(shared.at("1RECV_F2"), 100);
  EXPECT_EQ(shared.at("3RECV_F0"), 130);
}

TEST(Contention, RefusesCardsWithoutBandwidth) {
  cost::Cluster cluster = cost::equal_nodes(2, 1);
  for (const double bandwidth : {0.0, -1.0, std::nan("")}) {
    cluster.nic_bandwidth_bytes_per_s = bandwidth;
    const auto result = simulate(testing::lowered(ScheduleKind::k1F1B, even_shape(2, 2)),
                                 testing::equal_costs(2, 1, 1, 1), cluster);
    ASSERT_FALSE(result);
    EXPECT_NE(result.error().message.find("network cards"), std::string::npos);
  }
}

}  // namespace
}  // namespace dynmo::sim
