// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/pack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "dynmo/core/check.h"
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
      propose(Balancer::kOptimal, {{problem.model, part, problem.micro_batches}, problem.schedule});
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
    const BalanceProblem problem{{model, cluster, pick(rng, 1, 6)}};
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
    const BalanceProblem problem{{model, cluster, 12}, kind};
    const auto packing = pack(Balancer::kTime, problem, {.ranks = 4});
    ASSERT_TRUE(packing) << packing.error().message;
    EXPECT_EQ(packing->released, (std::vector<Rank>{Rank{4}, Rank{5}})) << schedule::name(kind);
    const cost::Cluster four = cost::equal_ranks(4);
    EXPECT_EQ(packing->proposal.evaluation.step_time_s,
              propose(Balancer::kTime, {{model, four, 12}, kind})->evaluation.step_time_s)
        << schedule::name(kind);
  }
}

TEST(Pack, BadInputIsNamed) {
  const cost::ModelCost model = equal_model(8, 1e-3);
  const cost::Cluster cluster = cost::equal_ranks(4, Bytes{20000});
  const BalanceProblem problem{{model, cluster, 4}};
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

std::vector<Rank> ranks_of(unsigned mask) {
  std::vector<Rank> ranks;
  for (int r = 0; mask >> r != 0; ++r) {
    if ((mask >> r & 1U) != 0) ranks.emplace_back(r);
  }
  return ranks;
}

TEST(ProposeOn, IsThePlanOfTheKeptRanksAlone) {
  int idle_between = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mix_key({0x0AE0, seed}));
    const int ranks = pick(rng, 1, 5);
    const cost::ModelCost model = random_model(rng, pick(rng, ranks, 10));
    cost::Cluster cluster = cost::equal_ranks(ranks);
    for (auto& rank : cluster.ranks) rank.speed = pick(rng, 1, 3) * 0.5;
    const auto kind = pick(rng, 0, 1) == 0 ? ScheduleKind::k1F1B : ScheduleKind::kAdaptive;
    const BalanceProblem problem{{model, cluster, pick(rng, 1, 5)}, kind};
    const auto kept = ranks_of(static_cast<unsigned>(pick(rng, 1, (1 << ranks) - 1)));
    cost::Cluster part = cluster;
    part.ranks.clear();
    for (const Rank rank : kept) part.ranks.push_back(cluster.ranks[rank.index()]);
    const auto alone =
        propose(Balancer::kOptimal, {{model, part, problem.micro_batches}, problem.schedule});
    const auto found = propose_on(kept, Balancer::kOptimal, problem);
    ASSERT_EQ(found.has_value(), alone.has_value());
    if (!found) continue;
    EXPECT_EQ(found->plan.ranks, ranks);
    EXPECT_TRUE(std::ranges::includes(kept, ranks_at_work(found->plan)));
    EXPECT_NEAR(found->evaluation.step_time_s, alone->evaluation.step_time_s,
                1e-9 * alone->evaluation.step_time_s);
    EXPECT_EQ(without_others(found->plan, kept), alone->plan);
    idle_between += kept.front() != Rank(0) ? 1 : 0;
  }
  EXPECT_GT(idle_between, 50);
}

TEST(ProposeOn, LeavesTheOthersIdleWhereTheyHoldWhatMoves) {
  const cost::ModelCost model = equal_model(8, 1e-3);
  cost::Cluster cluster = cost::equal_nodes(2, 2);
  cluster.between_nodes.latency_s = 1e-4;
  const Plan current = make_plan({5, 3, 0, 0}, ScheduleKind::k1F1B);
  for (const RankOrder order : {RankOrder::kPermuteEqual, RankOrder::kBest}) {
    const BalanceProblem problem{{model, cluster, 4}, ScheduleKind::k1F1B, 2, &current};
    for (unsigned mask = 1; mask < 16; ++mask) {
      const auto kept = ranks_of(mask);
      const auto found = propose_on(kept, Balancer::kOptimal, problem, {.rank_order = order});
      ASSERT_TRUE(found) << found.error().message;
      EXPECT_TRUE(std::ranges::includes(kept, ranks_at_work(found->plan))) << mask;
    }
  }
}

TEST(ProposeOn, SucceedsTheCurrentPlan) {
  const cost::ModelCost model = [] {
    Rng rng(3);
    return random_model(rng, 8);
  }();
  const cost::Cluster cluster = cost::equal_ranks(4);
  const Plan current = make_plan({2, 2, 2, 2}, ScheduleKind::k1F1B, /*generation=*/6);
  BalanceProblem problem{{model, cluster, 4}};
  problem.current = &current;
  const auto fewer = propose_on(ranks_of(0b0011), Balancer::kOptimal, problem);
  ASSERT_TRUE(fewer) << fewer.error().message;
  EXPECT_EQ(fewer->plan.generation, 7);
  problem.current = &fewer->plan;
  EXPECT_EQ(propose_on(ranks_of(0b0011), Balancer::kOptimal, problem)->plan, fewer->plan)
      << "the very same plan is no new generation";
  EXPECT_THROW(static_cast<void>(propose_on({}, Balancer::kOptimal, problem)), CheckFailure);
}

// The same stages on ranks that count otherwise: a replay of them takes as long.
TEST(WithoutOthers, TakesIdleRanksAwayAndWithMoreRanksGivesThemBack) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mix_key({0x0AE1, seed}));
    const int ranks = pick(rng, 2, 6);
    const cost::ModelCost model = random_model(rng, pick(rng, ranks, 12));
    const cost::Cluster cluster = cost::equal_ranks(ranks);
    const auto kind = pick(rng, 0, 1) == 0 ? ScheduleKind::k1F1B : ScheduleKind::kAdaptive;
    const BalanceProblem problem{{model, cluster, 3}, kind};
    const auto at_work = ranks_of(static_cast<unsigned>(pick(rng, 1, (1 << ranks) - 1)));
    auto proposal = propose_on(at_work, Balancer::kOptimal, problem);
    ASSERT_TRUE(proposal) << proposal.error().message;
    proposal->plan.generation = 9;
    // Some idle ranks stay.
    std::vector<Rank> kept = at_work;
    for (int r = 0; r < ranks; ++r) {
      if (!std::ranges::binary_search(at_work, Rank(r)) && pick(rng, 0, 1) == 0) {
        kept.insert(std::ranges::lower_bound(kept, Rank(r)), Rank(r));
      }
    }
    const auto step_s = [&](const Plan& plan) {
      const auto evaluation = evaluate(plan, {model, cost::equal_ranks(plan.ranks), 3});
      EXPECT_TRUE(evaluation) << evaluation.error().message;
      return evaluation ? evaluation->step_time_s : 0;
    };
    const Plan part = without_others(proposal->plan, kept);
    EXPECT_EQ(part.ranks, std::ssize(kept));
    EXPECT_EQ(part.generation, 9);
    EXPECT_EQ(ranks_at_work(part).size(), ranks_at_work(proposal->plan).size());
    for (int i = 0; i < part.layers(); ++i) {
      const Rank now = part.owner(LayerId(i));
      EXPECT_EQ(kept[now.index()], proposal->plan.owner(LayerId(i)));
    }
    EXPECT_EQ(step_s(part), step_s(proposal->plan));
    const Plan whole = with_more_ranks(part, ranks + 1);
    EXPECT_EQ(whole.ranks, ranks + 1);
    EXPECT_EQ(ranks_at_work(whole), ranks_at_work(part));
    EXPECT_EQ(step_s(whole), step_s(part));
    EXPECT_EQ(with_more_ranks(part, part.ranks), part);
  }
  const Plan plan = make_plan({1, 2, 3}, ScheduleKind::k1F1B);
  EXPECT_THROW(static_cast<void>(without_others(plan, ranks_of(0b011))), CheckFailure);
  EXPECT_THROW(static_cast<void>(with_more_ranks(plan, 2)), CheckFailure);
}

}  // namespace
}  // namespace dynmo::plan
