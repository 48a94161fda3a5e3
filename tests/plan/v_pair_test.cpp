// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "dynmo/plan/balance.h"
#include "tests/plan/cuts.h"
#include "tests/support/samples.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

struct PairScore {
  double bottleneck = 0;
  bool fits = true;
};

// Sums of the two stages of each rank, straight from their definition.
PairScore pair_score(const BalanceProblem& problem, const std::vector<int>& counts) {
  const int ranks = problem.cluster.size();
  std::vector<double> time(counts.size() / 2, 0.0);
  std::vector<std::int64_t> bytes(time.size(), 0);
  int layer = 0;
  for (int s = 0; s < 2 * ranks; ++s) {
    const auto rank = static_cast<std::size_t>(std::min(s, 2 * ranks - 1 - s));
    for (int i = 0; i < counts[static_cast<std::size_t>(s)]; ++i, ++layer) {
      const cost::LayerCost& cost = problem.model.layers[static_cast<std::size_t>(layer)];
      time[rank] += cost::work_s(problem.model, layer, problem.micro_batches);
      bytes[rank] += cost::state_bytes(cost).value;
      if (layer >= problem.model.frozen_layers()) {
        bytes[rank] += std::min(problem.micro_batches, ranks) * cost.activation_bytes.value;
      }
    }
  }
  PairScore score;
  for (std::size_t r = 0; r < time.size(); ++r) {
    score.bottleneck = std::max(score.bottleneck, time[r] / problem.cluster.ranks[r].speed);
    score.fits &= bytes[r] <= problem.cluster.ranks[r].memory.value;
  }
  return score;
}

TEST(VPair, EqualsBruteForceOverAllCuts) {
  int infeasible = 0;
  for (std::uint64_t seed = 0; seed < samples(2000U); ++seed) {
    Rng rng(mix_key({0x5EED, seed}));
    const int ranks = pick(rng, 1, 4);
    const int layers = pick(rng, 2 * ranks, 11);
    const bool whole = seed % 2 == 0;
    const cost::ModelCost model =
        whole ? whole_number_model(rng, layers) : random_model(rng, layers);
    cost::Cluster cluster = cost::equal_ranks(ranks);
    const int room = pick(rng, 30, 300);
    const bool limited = pick(rng, 0, 2) > 0;
    const bool equal = pick(rng, 0, 1) == 0;
    for (cost::ClusterRank& rank : cluster.ranks) {
      if (!equal) rank.speed = pick(rng, 1, 4) * 0.5;
      if (limited) rank.memory = Bytes{pick(rng, room / 2, 2 * room)};
    }
    const BalanceProblem problem{{model, cluster, pick(rng, 1, 6)}, ScheduleKind::kZbV};
    std::optional<double> least;
    for_each_cut(layers, 2 * ranks, [&](const std::vector<int>& counts) {
      const PairScore score = pair_score(problem, counts);
      if (score.fits && (!least || score.bottleneck < *least)) least = score.bottleneck;
    });
    const auto found = balance(Balancer::kVPair, problem);
    ASSERT_EQ(found.has_value(), least.has_value()) << "seed " << seed;
    if (!found) {
      ++infeasible;
      ASSERT_EQ(found.error().code, ErrorCode::kInfeasible) << "seed " << seed;
      continue;
    }
    ASSERT_EQ(found->size(), static_cast<std::size_t>(2 * ranks));
    ASSERT_GE(*std::min_element(found->begin(), found->end()), 1) << "seed " << seed;
    const PairScore ours = pair_score(problem, *found);
    ASSERT_TRUE(ours.fits) << "seed " << seed;
    ASSERT_LE(ours.bottleneck, *least * (1 + 1e-6)) << "seed " << seed;
  }
  EXPECT_GT(infeasible, samples(100));  // the verdict was really put to the test
  EXPECT_LT(infeasible, samples(1500));
}

TEST(VPair, TheUnitOfTimeChangesNoCut) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x5CA1E, seed}));
    const cost::ModelCost model = random_model(rng, pick(rng, 8, 40));
    const cost::ModelCost micro = scaled(model, 1e-6);
    const cost::Cluster cluster = cost::equal_ranks(pick(rng, 1, 4));
    ASSERT_EQ(*balance(Balancer::kVPair, {{model, cluster, 8}, ScheduleKind::kZbV}),
              *balance(Balancer::kVPair, {{micro, cluster, 8}, ScheduleKind::kZbV}))
        << "seed " << seed;
  }
}

TEST(VPair, LevelsSumsWhereLevelStagesAreUneven) {
  // 1 and 7 on rank 0, 3 and 5 on rank 1: no rank takes more than 8, though the stages differ.
  cost::ModelCost model = equal_model(4, 1);
  model.layers[1].forward_s += 6;
  model.layers[2].forward_s += 12;
  model.layers[3].forward_s += 18;
  EXPECT_EQ(*balance(Balancer::kVPair, {{model, cost::equal_ranks(2), 4}, ScheduleKind::kZbV}),
            (std::vector<int>{1, 1, 1, 1}));
}

TEST(VPair, WithoutVPlacementItSaysSo) {
  const auto result = balance(Balancer::kVPair,
                              {{equal_model(8, 1), cost::equal_ranks(2), 4}, ScheduleKind::k1F1B});
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kBadInput);
  EXPECT_NE(result.error().message.find("use schedule zb-v"), std::string::npos)
      << result.error().message;
  const auto few =
      balance(Balancer::kVPair, {{equal_model(7, 1), cost::equal_ranks(4), 4}, ScheduleKind::kZbV});
  ASSERT_FALSE(few);
  EXPECT_NE(few.error().message.find("4 ranks with 2 stages each for 7 layers"), std::string::npos)
      << few.error().message;
}

TEST(VPair, PlansLargeProblems) {
  Rng rng(3);
  const cost::ModelCost measured = random_model(rng, 128);
  cost::ModelCost lopsided = measured;
  lopsided.layers[64].forward_s = 0.05;
  cost::ModelCost headed = measured;
  headed.layers.back().forward_s = 0.01;
  for (const cost::ModelCost& model : {measured, lopsided, headed}) {
    ASSERT_TRUE(
        balance(Balancer::kVPair, {{model, cost::equal_ranks(16), 64}, ScheduleKind::kZbV}));
  }
}

}  // namespace
}  // namespace dynmo::plan
