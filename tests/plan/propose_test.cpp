// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/propose.h"

#include <gtest/gtest.h>

#include "tests/plan/cuts.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

TEST(Propose, GivesTheBalancersCutWithItsReplay) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(mix_key({0x9809, seed}));
    const cost::ModelCost model = random_model(rng, pick(rng, 6, 20));
    const cost::Cluster cluster = cost::equal_ranks(pick(rng, 1, 6));
    const BalanceProblem problem{model, cluster, pick(rng, 1, 8)};
    for (const Balancer balancer :
         {Balancer::kUniform, Balancer::kTime, Balancer::kDiffusionTime, Balancer::kOptimal}) {
      const auto proposal = propose(balancer, problem);
      ASSERT_TRUE(proposal) << proposal.error().message << ", seed " << seed;
      EXPECT_EQ(proposal->plan, make_plan(*balance(balancer, problem), ScheduleKind::k1F1B));
      EXPECT_EQ(proposal->evaluation.step_time_s,
                evaluate(proposal->plan, model, cluster, problem.micro_batches)->step_time_s);
      EXPECT_EQ(proposal->rounds > 0, balancer == Balancer::kDiffusionTime);
    }
  }
}

TEST(Propose, TheBestScheduleIsNoWorseThanAnyOfThem) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Rng rng(mix_key({0xBE57, seed}));
    const cost::ModelCost model = random_model(rng, pick(rng, 8, 20));
    const cost::Cluster cluster = cost::equal_ranks(pick(rng, 1, 4));
    BalanceProblem problem{model, cluster, 8};
    const auto best = propose(Balancer::kTime, problem, {.schedules = ScheduleChoice::kBest});
    ASSERT_TRUE(best) << best.error().message;
    for (const ScheduleKind kind : {ScheduleKind::kGpipe, ScheduleKind::k1F1B}) {
      problem.schedule = kind;
      ASSERT_LE(best->evaluation.step_time_s,
                propose(Balancer::kTime, problem)->evaluation.step_time_s)
          << "seed " << seed;
    }
    EXPECT_GE(best->candidates, 2);
  }
}

TEST(Propose, APlanOverTheMemoryIsRefusedByNameAndBytes) {
  const cost::ModelCost model = equal_model(8, 1e-3);  // 4,000 bytes of state a layer
  cost::Cluster cluster = cost::equal_ranks(4, Bytes{9000});
  cluster.ranks[2].memory = Bytes{8100};
  const auto refused = propose(Balancer::kUniform, {model, cluster, 8});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInfeasible);
  EXPECT_NE(refused.error().message.find("8400 bytes (8.2 KiB) on rank 2, which has 8100 bytes"),
            std::string::npos)
      << refused.error().message;
  cluster.ranks[2].memory = Bytes{8400};
  EXPECT_TRUE(propose(Balancer::kUniform, {model, cluster, 8}));
}

TEST(Propose, NumbersThePlanAfterTheCurrentOne) {
  const cost::ModelCost model = equal_model(8, 1e-3);
  const cost::Cluster cluster = cost::equal_ranks(4);
  BalanceProblem problem{model, cluster, 8};
  EXPECT_EQ(propose(Balancer::kUniform, problem)->plan.generation, 0);
  const Plan same = make_plan({2, 2, 2, 2}, ScheduleKind::k1F1B, 7);
  problem.current = &same;
  EXPECT_EQ(propose(Balancer::kUniform, problem)->plan, same);
  const Plan other = make_plan({1, 3, 2, 2}, ScheduleKind::k1F1B, 7);
  problem.current = &other;
  EXPECT_EQ(propose(Balancer::kUniform, problem)->plan.generation, 8);
}

}  // namespace
}  // namespace dynmo::plan
