// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/pack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "tests/plan/cuts.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

// Step time of the balancer on a part of the cluster; nullopt if its plan does not fit.
std::optional<double> step_on(const BalanceProblem& problem, unsigned mask) {
  cost::Cluster part = problem.cluster;
  part.ranks.clear();
  for (std::size_t r = 0; r < problem.cluster.ranks.size(); ++r) {
    if ((mask >> r & 1U) != 0) part.ranks.push_back(problem.cluster.ranks[r]);
  }
  const auto proposal =
      propose(Balancer::kOptimal, {problem.model, part, problem.micro_batches, problem.schedule});
  if (!proposal) return std::nullopt;
  return proposal->evaluation.step_time_s;
}

TEST(Pack, KeepsAsFewRanksAsTheBestOfAllChoices) {
  int packed = 0;
  int infeasible = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x9ACC, seed}));
    const int ranks = pick(rng, 1, 5);
    cost::ModelCost model = random_model(rng, pick(rng, ranks, 12));
    if (pick(rng, 0, 1) == 0) model.layers.back().forward_s = 5e-3;  // a bottleneck nobody shares
    cost::Cluster cluster = cost::equal_ranks(ranks);
    const bool equal = pick(rng, 0, 1) == 0;
    const int room = pick(rng, 60, 500);
    for (std::size_t r = 0; r < cluster.ranks.size(); ++r) {
      cluster.ranks[r].memory = Bytes{equal ? room : pick(rng, room / 2, 2 * room)};
      if (!equal) cluster.ranks[r].speed = pick(rng, 1, 3) * 0.5;
      cluster.ranks[r].node = static_cast<int>(r) / 2;
    }
    cluster.between_nodes.latency_s = equal ? 0 : 1e-4;
    const BalanceProblem problem{model, cluster, pick(rng, 1, 6)};
    const double slack = pick(rng, 0, 2) * 0.1;
    const auto packing = pack(Balancer::kOptimal, problem, {.slack = slack});
    const auto all = step_on(problem, (1U << ranks) - 1);
    ASSERT_EQ(packing.has_value(), all.has_value()) << "seed " << seed;
    if (!packing) {
      ++infeasible;
      continue;
    }
    int fewest = ranks;
    for (unsigned mask = 1; mask < (1U << ranks); ++mask) {
      const auto step = step_on(problem, mask);
      if (!step || *step > *all * (1 + slack)) continue;
      fewest = std::min(fewest, __builtin_popcount(mask));
    }
    const Proposal& proposal = packing->proposal;
    EXPECT_EQ(ranks - static_cast<int>(packing->released.size()), fewest) << "seed " << seed;
    EXPECT_LE(proposal.evaluation.step_time_s, *all * (1 + slack)) << "seed " << seed;
    EXPECT_TRUE(fits_memory(proposal.evaluation.result, cluster)) << "seed " << seed;
    for (const Rank rank : packing->released) EXPECT_TRUE(proposal.plan.stages_of(rank).empty());
    for (std::size_t s = 1; s < proposal.plan.stages.size(); ++s) {
      EXPECT_LT(proposal.plan.stages[s - 1].rank, proposal.plan.stages[s].rank);
    }
    packed += packing->released.empty() ? 0 : 1;
  }
  EXPECT_GT(packed, 50);
  EXPECT_GT(infeasible, 5);
}

TEST(Pack, EmptiesTheSlowThenWholeNodesThenTheHighestRanks) {
  cost::Cluster cluster = cost::equal_ranks(8);
  for (std::size_t r = 0; r < 8; ++r) cluster.ranks[r].node = static_cast<int>(r) / 4;
  const auto keep = [&](int count) {
    std::vector<int> kept;
    for (const Rank rank : ranks_to_keep(cluster, count)) kept.push_back(rank.value);
    return kept;
  };
  EXPECT_EQ(keep(6), (std::vector<int>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(keep(3), (std::vector<int>{0, 1, 2}));
  cluster.ranks[2].node = 7;  // a node of its own
  EXPECT_EQ(keep(7), (std::vector<int>{0, 1, 3, 4, 5, 6, 7}));
  EXPECT_EQ(keep(3), (std::vector<int>{0, 1, 3}));
  cluster.ranks[0].speed = 0.5;
  EXPECT_EQ(keep(7), (std::vector<int>{1, 2, 3, 4, 5, 6, 7}));
}

TEST(Pack, OntoAGivenNumberWithEverySchedule) {
  const cost::ModelCost model = equal_model(24, 1e-3);
  const cost::Cluster cluster = cost::equal_ranks(6);
  for (const ScheduleKind kind :
       {ScheduleKind::kGpipe, ScheduleKind::k1F1B, ScheduleKind::kInterleaved, ScheduleKind::kZbH1,
        ScheduleKind::kZbV, ScheduleKind::kAdaptive}) {
    const BalanceProblem problem{model, cluster, 12, kind};
    const auto packing = pack(Balancer::kTime, problem, {.ranks = 4});
    ASSERT_TRUE(packing) << packing.error().message;
    EXPECT_EQ(packing->released, (std::vector<Rank>{Rank{4}, Rank{5}})) << schedule::name(kind);
    const cost::Cluster four = cost::equal_ranks(4);
    EXPECT_EQ(packing->proposal.evaluation.step_time_s,
              propose(Balancer::kTime, {model, four, 12, kind})->evaluation.step_time_s)
        << schedule::name(kind);
  }
}

TEST(Pack, BadInputIsNamed) {
  const cost::ModelCost model = equal_model(8, 1e-3);
  const cost::Cluster cluster = cost::equal_ranks(4, Bytes{20000});
  const BalanceProblem problem{model, cluster, 4};
  const auto error = [&](const PackOptions& options) {
    const auto result = pack(Balancer::kOptimal, problem, options);
    return result ? Error{} : result.error();
  };
  EXPECT_NE(error({.slack = -1}).message.find("slack is -1"), std::string::npos);
  EXPECT_NE(error({.slack = std::nan("")}).message.find("slack is nan"), std::string::npos);
  EXPECT_NE(error({.ranks = 5}).message.find("onto 5 ranks"), std::string::npos);
  EXPECT_EQ(error({.ranks = 1}).code, ErrorCode::kInfeasible);  // 8 layers of 4,000 bytes
  EXPECT_NE(error({.ranks = 1}).message.find("rank 0"), std::string::npos);
}

}  // namespace
}  // namespace dynmo::plan
