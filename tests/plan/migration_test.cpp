// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/migration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "dynmo/plan/place.h"
#include "dynmo/plan/propose.h"
#include "tests/plan/cuts.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

// Any stages on any ranks, some of them idle.
Plan scattered_plan(Rng& rng, int layers, int ranks) {
  std::vector<int> counts;
  std::vector<Rank> placement;
  for (int left = layers; left > 0; left -= counts.back()) {
    counts.push_back(pick(rng, 1, std::min(left, 3)));
    placement.emplace_back(pick(rng, 0, ranks - 1));
  }
  return make_plan(counts, placement, ranks, ScheduleKind::kAdaptive);
}

TEST(Migration, AppliedToTheOldOwnersItGivesTheNewOnes) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Rng rng(mix_key({0x316, seed}));
    const cost::ModelCost model = whole_number_model(rng, pick(rng, 1, 20));
    const int ranks = pick(rng, 1, 6);
    const Plan from = scattered_plan(rng, model.size(), ranks);
    const Plan to = scattered_plan(rng, model.size(), ranks);
    EXPECT_EQ(difference(from, to, model).apply(owners(from)), owners(to)) << "seed " << seed;
    EXPECT_TRUE(difference(from, from, model).moves.empty());
  }
}

// Three layers of 10 bytes of parameters, 20 of gradients, 30 of moments and 5 of stash on two
// ranks; one moves to rank 1, whose step holds one layer, and needs 60 bytes more.
TEST(Migration, NeedsTheMemoryOfAStepAndOfTheLayersThatCome) {
  cost::ModelCost model;
  model.layers.assign(3, {.name = "layer",
                          .forward_s = 1,
                          .backward_input_s = 1,
                          .backward_weight_s = 1,
                          .parameter_bytes = Bytes{10},
                          .gradient_bytes = Bytes{20},
                          .optimizer_bytes = Bytes{30},
                          .copy_bytes = Bytes{},
                          .activation_bytes = Bytes{5},
                          .boundary_bytes = Bytes{}});
  const Plan from = make_plan(std::vector<int>{2, 1}, ScheduleKind::k1F1B);
  const Plan to = make_plan(std::vector<int>{1, 2}, ScheduleKind::k1F1B);
  const Migration migration = difference(from, to, model);
  EXPECT_EQ(migration.bytes(), Bytes{40});
  EXPECT_EQ(migration.gradient_bytes(model), Bytes{20});
  cost::Cluster cluster = cost::equal_ranks(2);
  EXPECT_TRUE(holds_both(from, migration, {model, cluster, 1}));
  cluster.ranks[1].memory = Bytes{125};
  EXPECT_TRUE(holds_both(from, migration, {model, cluster, 1}));
  cluster.ranks[1].memory = Bytes{124};
  EXPECT_FALSE(holds_both(from, migration, {model, cluster, 1}));
  model.layers[0].frozen = model.layers[1].frozen = true;
  EXPECT_EQ(difference(from, to, model).gradient_bytes(model), Bytes{0});
}

TEST(Align, MovesAsFewBytesAsTheBestOfAllPermutations) {
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    Rng rng(mix_key({0xA119, seed}));
    const cost::ModelCost model = whole_number_model(rng, pick(rng, 1, 16));
    const int ranks = pick(rng, 1, 6);
    cost::Cluster cluster = cost::equal_ranks(ranks);
    for (cost::ClusterRank& rank : cluster.ranks) {
      if (pick(rng, 0, 3) == 0) rank.speed = 2;
      if (pick(rng, 0, 5) == 0) rank.node = 1;
    }
    const Plan from = scattered_plan(rng, model.size(), ranks);
    const Plan to = scattered_plan(rng, model.size(), ranks);
    std::vector<int> name(static_cast<std::size_t>(ranks));
    std::iota(name.begin(), name.end(), 0);
    Bytes least = difference(from, to, model).bytes();
    do {
      bool equal = true;
      for (std::size_t r = 0; r < name.size(); ++r) {
        equal &= cluster.ranks[r] == cluster.ranks[static_cast<std::size_t>(name[r])];
      }
      if (!equal) continue;
      Plan other = to;
      for (PlanStage& stage : other.stages) stage.rank = Rank{name[stage.rank.index()]};
      least = std::min(least, difference(from, other, model).bytes());
    } while (std::next_permutation(name.begin(), name.end()));
    const Plan aligned = align(to, from, cluster, model);
    ASSERT_EQ(difference(from, aligned, model).bytes(), least) << "seed " << seed;
    for (std::size_t s = 0; s < to.stages.size(); ++s) {
      ASSERT_EQ(aligned.stages[s].layers, to.stages[s].layers);
      ASSERT_EQ(cluster.ranks[aligned.stages[s].rank.index()],
                cluster.ranks[to.stages[s].rank.index()]);
    }
    EXPECT_EQ(align(from, from, cluster, model), from) << "seed " << seed;
  }
}

TEST(Align, KeepsTheStepTimeOfEverySchedule) {
  for (const ScheduleKind kind :
       {ScheduleKind::k1F1B, ScheduleKind::kInterleaved, ScheduleKind::kZbH1, ScheduleKind::kZbV,
        ScheduleKind::kAdaptive}) {
    Rng rng(11);
    const cost::ModelCost model = random_model(rng, 24);
    cost::Cluster cluster = cost::equal_ranks(6);
    for (int r = 3; r < 6; ++r) cluster.ranks[static_cast<std::size_t>(r)].node = 1;
    cluster.between_nodes.latency_s = 1e-4;
    const BalanceProblem problem{{model, cluster, 12}, kind};
    const Proposal plain = propose(Balancer::kTime, problem).value();
    // The same plan under other names of equal ranks is what is in force.
    Plan current = plain.plan;
    for (PlanStage& stage : current.stages) {
      stage.rank = Rank{stage.rank.value / 3 * 3 + (stage.rank.value + 1) % 3};
    }
    BalanceProblem again = problem;
    again.current = &current;
    const Proposal kept =
        propose(Balancer::kTime, again, {.rank_order = RankOrder::kPermuteEqual}).value();
    EXPECT_TRUE(difference(current, kept.plan, model).moves.empty()) << schedule::name(kind);
    EXPECT_EQ(kept.evaluation.step_time_s, plain.evaluation.step_time_s) << schedule::name(kind);
  }
}

TEST(Align, ManyEqualRanksAreMatchedGreedily) {
  const int ranks = 600;
  const cost::ModelCost model = equal_model(ranks, 1e-3);
  const Plan from =
      make_plan(std::vector<int>(static_cast<std::size_t>(ranks), 1), ScheduleKind::k1F1B);
  Plan shifted = from;
  for (PlanStage& stage : shifted.stages) stage.rank = Rank{(stage.rank.value + 1) % ranks};
  EXPECT_EQ(align(shifted, from, cost::equal_ranks(ranks), model), from);
}

}  // namespace
}  // namespace dynmo::plan
