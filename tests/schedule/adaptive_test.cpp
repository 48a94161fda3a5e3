// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/adaptive.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "dynmo/schedule/check.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/simulate.h"
#include "tests/schedule/random_pipelines.h"
#include "tests/support/samples.h"

namespace dynmo::schedule {
namespace {

using testing::pick;

struct Case {
  AdaptiveProblem problem;
  std::vector<sim::StageCost> costs;
  cost::Cluster cluster;
  DuePolicy policy;
};

// Costs in nanoseconds, small or zero so that ties abound, or of very unequal sizes.
std::int64_t random_cost(Rng& rng, bool unequal) {
  return unequal ? pick(rng, 0, 5) * pick(rng, 1, 200) : pick(rng, 0, 4);
}

DuePolicy random_policy(Rng& rng, std::size_t stages) {
  constexpr int kWhole = DuePolicy::kWhole;
  DuePolicy policy{.forward = pick(rng, -kWhole, 3 * kWhole),
                   .gradient = pick(rng, -kWhole, 3 * kWhole),
                   .weight_delay = pick(rng, -2, 100) * kWhole,
                   .wait_for_weight = pick(rng, 0, kWhole),
                   .wait_for_others = pick(rng, 0, kWhole)};
  if (pick(rng, 0, 1) == 0) return policy;
  for (std::size_t s = 0; s < stages; ++s) {
    policy.offsets.push_back({pick(rng, -4 * kWhole, 4 * kWhole),
                              pick(rng, -4 * kWhole, 4 * kWhole),
                              pick(rng, -4 * kWhole, 4 * kWhole)});
  }
  return policy;
}

// Any placement, costs and frozen prefix; limits of 1 to 4 times one micro-batch's need.
Case random_case(std::uint64_t seed) {
  Rng rng(mix_key({0xADA, seed}));
  Case made;
  PipelineShape& shape = made.problem.shape;
  shape = pick(rng, 0, 3) == 0 ? testing::random_shape(rng) : testing::random_crowded_shape(rng);
  const bool unequal = pick(rng, 0, 1) == 0;
  made.cluster = cost::equal_ranks(shape.ranks);
  made.cluster.inside_node.latency_s = 1e-9 * pick(rng, 0, unequal ? 300 : 3);
  if (pick(rng, 0, 1) == 0) made.cluster.inside_node.bandwidth_bytes_per_s = 1e9;
  std::vector<std::int64_t> need(static_cast<std::size_t>(shape.ranks), 0);
  for (std::size_t s = 0; s < shape.stages.size(); ++s) {
    sim::StageCost cost;
    cost.forward = Nanoseconds{random_cost(rng, unequal)};
    cost.input_gradient = Nanoseconds{random_cost(rng, unequal)};
    cost.weight_gradient = Nanoseconds{random_cost(rng, unequal)};
    cost.activation = Bytes{random_cost(rng, unequal)};
    cost.boundary = Bytes{pick(rng, 0, 3)};
    made.costs.push_back(cost);
    if (!shape.stages[s].frozen) need[shape.stages[s].rank.index()] += cost.activation.value;
  }
  const auto transfer = [&](std::size_t from, std::size_t to) {
    if (shape.stages[from].rank == shape.stages[to].rank) return Nanoseconds{0};
    const cost::Link& link = made.cluster.inside_node;
    const auto bytes = static_cast<double>(made.costs[std::min(from, to)].boundary.value);
    return to_nanoseconds(link.latency_s + bytes / link.bandwidth_bytes_per_s);
  };
  for (std::size_t s = 0; s < shape.stages.size(); ++s) {
    const bool last = s + 1 == shape.stages.size();
    made.problem.stages.push_back(
        {.forward = made.costs[s].forward,
         .input_gradient = made.costs[s].input_gradient,
         .weight_gradient = made.costs[s].weight_gradient,
         .activation_transfer = s == 0 ? Nanoseconds{0} : transfer(s - 1, s),
         .gradient_transfer = last ? Nanoseconds{0} : transfer(s + 1, s),
         .stash = made.costs[s].activation,
         .restored = {}});
  }
  const bool tight = pick(rng, 0, 2) == 0;
  for (const std::int64_t bytes : need) {
    made.problem.stash_limit.emplace_back(tight ? bytes : bytes * pick(rng, 10, 40) / 10);
  }
  made.policy = random_policy(rng, shape.stages.size());
  return made;
}

TEST(Adaptive, NeverDeadlocksNorExceedsItsLimitAndTheReplayAgrees) {
  for (std::uint64_t seed = 0; seed < samples(100000U); ++seed) {
    const Case input = random_case(seed);
    const auto made = make_adaptive(input.problem, input.policy);
    ASSERT_TRUE(made) << made.error().message << ", seed " << seed;
    const auto replay = sim::simulate(lower(made->schedule), input.costs, input.cluster);
    ASSERT_TRUE(replay) << replay.error().message << ", seed " << seed;
    ASSERT_EQ(replay->step_time, made->makespan) << "seed " << seed;
    for (std::size_t r = 0; r < replay->ranks.size(); ++r) {
      ASSERT_LE(replay->ranks[r].peak_activation, input.problem.stash_limit[r])
          << "seed " << seed << ", rank " << r;
    }
  }
}

TEST(Adaptive, StopsExactlyWhereTheMakespanExceedsTheBound) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const Case input = random_case(seed);
    ListScheduler scheduler;
    scheduler.load(input.problem.shape, input.problem.stages, input.problem.stash_limit);
    const std::int64_t makespan = scheduler.run(input.policy, ListScheduler::kStopped);
    ASSERT_EQ(makespan, make_adaptive(input.problem, input.policy)->makespan.count());
    ASSERT_EQ(scheduler.run(input.policy, makespan), makespan) << "seed " << seed;
    if (makespan == 0) continue;
    ASSERT_EQ(scheduler.run(input.policy, makespan - 1), ListScheduler::kStopped)
        << "seed " << seed;
  }
}

AdaptiveProblem equal_problem(int ranks, int stages_per_rank, int micro_batches, Bytes limit) {
  AdaptiveProblem problem{
      .shape = {.ranks = ranks, .micro_batches = micro_batches, .stages = {}},
      .stages = {},
      .stash_limit = std::vector<Bytes>(static_cast<std::size_t>(ranks), limit)};
  for (int s = 0; s < ranks * stages_per_rank; ++s) {
    const int lap = s / ranks;
    const int rank = lap % 2 == 0 ? s % ranks : ranks - 1 - s % ranks;
    problem.shape.stages.push_back({.rank = Rank{rank}});
    problem.stages.push_back({.forward = Nanoseconds{100},
                              .input_gradient = Nanoseconds{100},
                              .weight_gradient = Nanoseconds{100},
                              .stash = Bytes{1},
                              .restored = {}});
  }
  return problem;
}

TEST(Adaptive, ReachesTheFillOfAZeroBubbleScheduleWhereStagesAreEqual) {
  // No rank can start before the F of those in front: 6 actions a micro-batch and P - 1 F at best.
  const AdaptiveProblem problem = equal_problem(4, 2, 16, Bytes{8});
  std::int64_t least = ListScheduler::kStopped;
  for (const int forward : {0, 1, 2}) {
    for (const int delay : {0, 1, 3, 100}) {
      const auto made = make_adaptive(problem, {.forward = forward * DuePolicy::kWhole / 2,
                                                .gradient = 0,
                                                .weight_delay = delay * DuePolicy::kWhole});
      ASSERT_TRUE(made) << made.error().message;
      least = std::min(least, made->makespan.count());
    }
  }
  EXPECT_EQ(least, (16 * 6 + 3) * 100);
}

TEST(Adaptive, WithStashesForOneMicroBatchTheyPassOneByOne) {
  const auto made = make_adaptive(equal_problem(3, 1, 4, Bytes{1}));
  ASSERT_TRUE(made) << made.error().message;
  for (const int most : in_flight(made->schedule)) EXPECT_EQ(most, 1);
}

TEST(Adaptive, SaysWhatWouldDo) {
  const auto tight = make_adaptive(equal_problem(2, 2, 4, Bytes{1}));
  ASSERT_FALSE(tight);
  EXPECT_EQ(tight.error().code, ErrorCode::kInfeasible);
  EXPECT_NE(tight.error().message.find("rank 0 may stash 1 B, one micro-batch takes 2 B"),
            std::string::npos)
      << tight.error().message;
  AdaptiveProblem wrong = equal_problem(2, 1, 4, Bytes{4});
  wrong.stages[1].forward = Nanoseconds{-1};
  EXPECT_EQ(make_adaptive(wrong).error().message, "stage 1 has a cost of -1; want 0 or more");
  EXPECT_FALSE(make_adaptive(equal_problem(2, 1, 4, Bytes{4}), {.wait_for_weight = -1}));
  EXPECT_FALSE(make_adaptive(equal_problem(2, 1, 4, Bytes{4}), {.offsets = {{}, {}, {}}}));
}

}  // namespace
}  // namespace dynmo::schedule
