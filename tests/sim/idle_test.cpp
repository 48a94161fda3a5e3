// SPDX-License-Identifier: Apache-2.0
// The split of idle time, data-parallel reductions and memory over time.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "dynmo/core/check.h"
#include "tests/sim/longest_path.h"
#include "tests/sim/problems.h"

namespace dynmo::sim {
namespace {

using schedule::ScheduleKind;
using schedule::testing::even_shape;
using schedule::testing::pick;
using testing::cluster_of;
using testing::equal_costs;
using testing::lowered;
using testing::Problem;

Nanoseconds sum(const IdleSplit& split) {
  return split.fill_drain + split.imbalance + split.communication + split.straggler;
}

SimResult replayed(const Problem& problem) {
  const auto result = simulate(problem.schedule, problem.costs, problem.cluster);
  EXPECT_TRUE(result);
  return *result;
}

Problem one_f_one_b(int ranks, int micro_batches) {
  return {.schedule = lowered(ScheduleKind::k1F1B, even_shape(ranks, micro_batches)),
          .costs = equal_costs(ranks, 100, 100, 100),
          .cluster = cluster_of(ranks)};
}

// Random pipelines of all kinds: several, no, empty and frozen stages a rank, any speeds, links,
// cards, reductions.
Problem random_case(Rng& rng) {
  Problem problem = testing::random_problem(rng, pick(rng, 0, 1) == 0);
  if (pick(rng, 0, 1) == 0) {
    problem.cluster.nic_bandwidth_bytes_per_s = 1e8 + 1e10 * rng.uniform();
  }
  if (pick(rng, 0, 3) == 0) {  // seconds and minutes: roundings of doubles matter
    for (StageCost& cost : problem.costs) {
      cost.forward *= 1'000'000'000LL;
      cost.update *= 1'234'567'891LL;
    }
  }
  return problem;
}

TEST(IdleSplit, AddsUpToIdleTimeExactly) {
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mix_key({71, seed}));
    const Problem problem = random_case(rng);
    const SimResult result = replayed(problem);
    for (const RankUsage& rank : result.ranks) {
      ASSERT_EQ(sum(rank.split), rank.idle);
      ASSERT_GE(rank.split.fill_drain.count(), 0);
      ASSERT_GE(rank.split.imbalance.count(), 0);
      ASSERT_GE(rank.split.communication.count(), 0);
      ASSERT_GE(rank.split.straggler.count(), 0);
    }
    const BubbleSplit& bubble = result.bubble_split;
    ASSERT_NEAR(bubble.fill_drain + bubble.imbalance + bubble.communication + bubble.straggler,
                result.bubble, 1e-12);
  }
}

// The oracle follows the definition, with the step time without transfers from the other
// implementation.
TEST(IdleSplit, IsWhatItsDefinitionSays) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mix_key({72, seed}));
    const Problem problem = random_case(rng);
    const SimResult result = replayed(problem);

    Problem free = problem;
    free.cluster.inside_node = free.cluster.between_nodes = {};
    for (StageCost& cost : free.costs) cost.reduction = Nanoseconds{0};
    const Nanoseconds free_step{
        testing::LongestPath(free.schedule, free.costs, free.cluster).step_time()};
    Problem even = free;
    double fastest = 0;
    for (const schedule::StageShape& stage : problem.schedule.shape.stages) {
      fastest = std::max(fastest, problem.cluster.ranks[stage.rank.index()].speed);
    }
    for (cost::ClusterRank& rank : even.cluster.ranks) rank.speed = fastest;
    const SimResult evened = replayed(even);

    Nanoseconds pace{0};
    Nanoseconds most{0};
    for (const RankUsage& rank : result.ranks) pace = std::max(pace, rank.busy);
    for (const RankUsage& rank : evened.ranks) most = std::max(most, rank.busy);
    for (const RankUsage& rank : result.ranks) {
      ASSERT_EQ(rank.split.communication, result.step_time - free_step);
      ASSERT_EQ(rank.split.fill_drain, free_step - pace);
      ASSERT_EQ(rank.split.imbalance, std::max(Nanoseconds{0}, most - rank.busy));
    }
  }
}

TEST(IdleSplit, EqualStagesOnlyFillAndDrain) {
  const SimResult result = replayed(one_f_one_b(4, 8));
  for (const RankUsage& rank : result.ranks) {
    EXPECT_EQ(rank.idle.count(), 3 * 300);
    EXPECT_EQ(rank.split.fill_drain, rank.idle);
  }
  EXPECT_DOUBLE_EQ(result.bubble_split.fill_drain, 3.0 / 11);
}

TEST(IdleSplit, ASlowRankIsAStraggler) {
  Problem problem = one_f_one_b(4, 8);
  problem.cluster.ranks[2].speed = 0.5;
  const SimResult result = replayed(problem);
  for (std::size_t r = 0; r < 4; ++r) {
    EXPECT_EQ(result.ranks[r].split.straggler.count(), r == 2 ? 0 : 8 * 300);
    EXPECT_EQ(result.ranks[r].split.imbalance.count(), 0);
    EXPECT_EQ(result.ranks[r].split.communication.count(), 0);
  }
}

TEST(IdleSplit, AHeavyStageIsImbalance) {
  Problem problem = one_f_one_b(4, 8);
  problem.costs[2].forward = Nanoseconds{250};
  const SimResult result = replayed(problem);
  for (std::size_t r = 0; r < 4; ++r) {
    EXPECT_EQ(result.ranks[r].split.imbalance.count(), r == 2 ? 0 : 8 * 150);
    EXPECT_EQ(result.ranks[r].split.straggler.count(), 0);
    EXPECT_EQ(result.ranks[r].split.communication.count(), 0);
  }
}

// Rank 1 is half as fast and has 200 ns of work at full speed, rank 2 has 600: of the 300 that a
// rank of work 300 is behind, all is imbalance, since even speeds would not change the pace.
TEST(IdleSplit, ASlowRankWithLittleWorkHoldsNobodyUp) {
  Problem problem = one_f_one_b(3, 1);
  problem.cluster.ranks[1].speed = 0.5;
  problem.costs[1] = equal_costs(1, 100, 50, 50)[0];
  problem.costs[2] = equal_costs(1, 200, 200, 200)[0];
  const SimResult result = replayed(problem);
  const std::vector<std::int64_t> imbalance = {300, 200, 0};
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(result.ranks[r].split.imbalance.count(), imbalance[r]);
    EXPECT_EQ(result.ranks[r].split.straggler.count(), 0);
  }
}

TEST(IdleSplit, AFastRankWithoutAStageMakesNobodyAStraggler) {
  Problem problem = one_f_one_b(2, 4);
  problem.schedule.shape.ranks = 3;
  problem.schedule.ranks.emplace_back();
  problem.cluster.ranks.push_back({.speed = 3});
  const SimResult result = replayed(problem);
  EXPECT_EQ(result.ranks[2].split.imbalance.count(), 4 * 300);
  EXPECT_EQ(result.ranks[2].split.straggler.count(), 0);
}

TEST(IdleSplit, LatencyIsCommunication) {
  Problem problem = one_f_one_b(4, 8);
  const Nanoseconds free = replayed(problem).step_time;
  problem.cluster.inside_node.latency_s = 40e-9;
  const SimResult result = replayed(problem);
  ASSERT_GT(result.step_time, free);
  for (const RankUsage& rank : result.ranks) {
    EXPECT_EQ(rank.split.communication, result.step_time - free);
    EXPECT_EQ(rank.split.fill_drain.count(), 3 * 300);
  }
}

// An example worked out by hand. 1F1B on four ranks of two nodes, M = 4; F = I = W = 100 ns but F
// of stage 1 150 ns; rank 3 has speed 0.8. A message takes 10 ns inside a node and 30 ns between
// nodes. Rank 3 sets the pace, 4 x 375 + 25 = 1525 ns. The first micro-batch passes stages 0 to 2
// before it starts (350 ns), and the last gradient goes back through them after its end (600 ns):
// fill/drain 950. Six messages (100 ns) and the reduction of stage 0 (40 ns) lie on that way:
// communication 140. At equal speeds rank 1 would set the pace at 1420 ns: straggler 105.
TEST(IdleSplit, WorkedExample) {
  Problem problem = one_f_one_b(4, 4);
  problem.costs[1].forward = Nanoseconds{150};
  for (StageCost& cost : problem.costs) {
    cost.boundary = Bytes{60};
    cost.reduction = Nanoseconds{40};
    cost.update = Nanoseconds{20};
  }
  problem.cluster = cost::equal_nodes(2, 2);
  problem.cluster.ranks[3].speed = 0.8;
  problem.cluster.inside_node = {.latency_s = 5e-9, .bandwidth_bytes_per_s = 12e9};
  problem.cluster.between_nodes = {.latency_s = 10e-9, .bandwidth_bytes_per_s = 6e9};
  problem.cluster.nic_bandwidth_bytes_per_s = 3e9;
  const SimResult result = replayed(problem);
  EXPECT_EQ(result.step_time.count(), 2615);
  struct Row {
    std::int64_t busy, fill_drain, imbalance, communication, straggler;
  };
  const std::vector<Row> rows = {{1220, 950, 200, 140, 105},
                                 {1420, 950, 0, 140, 105},
                                 {1220, 950, 200, 140, 105},
                                 {1525, 950, 0, 140, 0}};
  for (std::size_t r = 0; r < rows.size(); ++r) {
    SCOPED_TRACE(fmt::format("rank {}", r));
    const RankUsage& rank = result.ranks[r];
    EXPECT_EQ(rank.busy.count(), rows[r].busy);
    EXPECT_EQ(rank.split.fill_drain.count(), rows[r].fill_drain);
    EXPECT_EQ(rank.split.imbalance.count(), rows[r].imbalance);
    EXPECT_EQ(rank.split.communication.count(), rows[r].communication);
    EXPECT_EQ(rank.split.straggler.count(), rows[r].straggler);
  }
  EXPECT_NEAR(result.bubble, 0.485, 5e-4);
  EXPECT_NEAR(result.bubble_split.fill_drain, 0.363, 5e-4);
  EXPECT_NEAR(result.bubble_split.imbalance, 0.038, 5e-4);
  EXPECT_NEAR(result.bubble_split.communication, 0.054, 5e-4);
  EXPECT_NEAR(result.bubble_split.straggler, 0.030, 5e-4);
}

TEST(Reduction, ARankReducesItsStagesInTurnBesideCompute) {
  // One rank, two stages, GPipe order: the backward of stage 1 ends at 10 + 10 + 20, that of stage
  // 0 at 60.
  schedule::PipelineShape shape{
      .ranks = 1, .micro_batches = 1, .stages = {{.rank = Rank{0}}, {.rank = Rank{0}}}};
  schedule::Schedule schedule{.shape = shape, .ranks = {{}}, .lowered = true};
  for (const char* text : {"0F0", "1F0", "1B0", "0B0"}) {
    schedule.ranks[0].push_back(*schedule::parse_action(text));
  }
  Problem problem{.schedule = schedule, .costs = equal_costs(2, 10, 10, 10), .cluster = {}};
  problem.cluster = cluster_of(1);
  problem.costs[0].update = Nanoseconds{5};
  const auto step = [&](std::int64_t first, std::int64_t second) {
    problem.costs[0].reduction = Nanoseconds{first};
    problem.costs[1].reduction = Nanoseconds{second};
    const SimResult result = replayed(problem);
    EXPECT_EQ(result.ranks[0].split.communication, result.ranks[0].idle);
    return result.step_time.count();
  };
  EXPECT_EQ(step(0, 0), 65);
  EXPECT_EQ(step(0, 20), 65) << "behind the backward of stage 0";
  EXPECT_EQ(step(0, 50), 40 + 50 + 5);
  EXPECT_EQ(step(7, 10), 60 + 7 + 5);
  EXPECT_EQ(step(7, 50), 40 + 50 + 7 + 5) << "one network";
  problem.schedule.shape.stages[0].frozen = true;
  problem.schedule.ranks[0].pop_back();
  EXPECT_EQ(step(100, 0), 40) << "a frozen stage has nothing to reduce and nothing to update";
}

TEST(Reduction, TakesTheTimeOfARing) {
  const cost::Link link{.latency_s = 1e-6, .bandwidth_bytes_per_s = 1e9};
  EXPECT_EQ(all_reduce_time(Bytes{1'000'000}, 1, link).count(), 0);
  EXPECT_EQ(all_reduce_time(Bytes{1'000'000}, 2, link).count(), 2'000 + 1'000'000);
  EXPECT_EQ(all_reduce_time(Bytes{1'000'000}, 4, link).count(), 6'000 + 1'500'000);
  EXPECT_EQ(all_reduce_time(Bytes{0}, 4, {}).count(), 0);
  EXPECT_EQ(all_reduce_time(Bytes{1 << 30}, 4, {.bandwidth_bytes_per_s = 1e-300}).count(),
            std::int64_t{1} << 62);
  EXPECT_THROW((void)all_reduce_time(Bytes{1}, 0, link), CheckFailure);
  EXPECT_THROW((void)all_reduce_time(Bytes{-1}, 2, link), CheckFailure);
}

// The schoolbook ring, round by round: replica r passes share (r - round) on and adds what arrives,
// then the sums go round. Counts what the closed form claims: rounds, bytes a replica sends.
TEST(Reduction, ARingPassesEachShareTwiceAlmostRound) {
  for (int replicas = 2; replicas <= 9; ++replicas) {
    const auto n = static_cast<std::size_t>(replicas);
    std::vector<std::vector<int>> sums(n, std::vector<int>(n, 1));  // [replica][share]
    int rounds = 0;
    const auto pass = [&](std::size_t offset, bool add) {
      const auto before = sums;
      for (std::size_t r = 0; r < n; ++r) {
        const std::size_t share = (r + offset) % n;
        int& there = sums[(r + 1) % n][share];
        there = before[r][share] + (add ? there : 0);
      }
      ++rounds;
    };
    for (std::size_t round = 0; round + 1 < n; ++round) pass(n - round, true);
    for (std::size_t round = 0; round + 1 < n; ++round) pass(n + 1 - round, false);
    for (const auto& replica : sums) {
      for (const int share : replica) ASSERT_EQ(share, replicas);
    }
    const cost::Link link{.latency_s = 5e-9, .bandwidth_bytes_per_s = 1e9};
    const Bytes gradients{1000 * replicas};  // so a share takes 1000 ns
    EXPECT_EQ(all_reduce_time(gradients, replicas, link).count(), rounds * (5 + 1000));
  }
}

TEST(MemoryOverTime, IsWhatTheTimelineSays) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mix_key({73, seed}));
    const Problem problem = random_case(rng);
    const auto result = simulate(problem.schedule, problem.costs, problem.cluster,
                                 {.timeline = true, .memory = true});
    ASSERT_TRUE(result);
    ASSERT_EQ(result->memory.size(), result->ranks.size());
    for (std::size_t r = 0; r < result->ranks.size(); ++r) {
      const std::vector<MemoryStep>& steps = result->memory[r];
      Bytes state;
      for (std::size_t s = 0; s < problem.costs.size(); ++s) {
        if (problem.schedule.shape.stages[s].rank.index() == r) state += problem.costs[s].state;
      }
      ASSERT_EQ(steps.front(), (MemoryStep{Nanoseconds{0}, state}));
      ASSERT_EQ(steps.back().bytes, state) << "every stash ends";
      Bytes peak;
      for (const MemoryStep& step : steps) peak = std::max(peak, step.bytes);
      ASSERT_EQ(peak, result->ranks[r].peak_memory);
      // At any moment: what started with F and has not ended with B or W.
      for (std::size_t i = 0; i < steps.size(); ++i) {
        ASSERT_GE(steps[i].time, steps[i == 0 ? 0 : i - 1].time);
        if (i + 1 < steps.size() && steps[i + 1].time == steps[i].time) continue;
        Bytes held = state;
        for (const schedule::TimedAction& span : result->timeline.ranks[r]) {
          const std::size_t s = span.action.stage.index();
          if (problem.schedule.shape.stages[s].frozen) continue;
          const Bytes stash = problem.costs[s].activation;
          using enum schedule::ActionKind;
          if (span.action.kind == kForward && span.start <= steps[i].time) held += stash;
          const bool ends = span.action.kind == kBackward || span.action.kind == kWeightGradient;
          if (ends && span.end <= steps[i].time) held -= stash;
        }
        ASSERT_EQ(steps[i].bytes, held) << "rank " << r << " at " << steps[i].time.count();
      }
    }
  }
}

}  // namespace
}  // namespace dynmo::sim
