// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/place.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/propose.h"
#include "dynmo/plan/traffic.h"
#include "tests/plan/cuts.h"
#include "tests/support/samples.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

cost::ModelCost model_with_messages(Rng& rng, int layers) {
  cost::ModelCost model = random_model(rng, layers);
  for (cost::LayerCost& layer : model.layers) layer.boundary_bytes = Bytes{pick(rng, 1, 1000)};
  return model;
}

// Every node on one of two switches, with a slow link between these.
void put_on_switches(Rng& rng, cost::Cluster& cluster) {
  cluster.between_switches = {.latency_s = 3e-4 * rng.uniform(), .bandwidth_bytes_per_s = 3e5};
  const int seed = pick(rng, 0, 1 << 20);
  for (cost::ClusterRank& rank : cluster.ranks) {
    Rng of_node(mix_key({static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(rank.node)}));
    rank.network_switch = 5 * pick(of_node, 0, 1);
  }
}

// Ranks of few kinds on nodes in any order.
cost::Cluster mixed_cluster(Rng& rng, int ranks) {
  cost::Cluster cluster = cost::equal_ranks(ranks);
  const int nodes = pick(rng, 1, 3);
  const bool unequal = pick(rng, 0, 3) == 0;
  for (cost::ClusterRank& rank : cluster.ranks) {
    rank.node = 7 * pick(rng, 0, nodes - 1);
    if (unequal && pick(rng, 0, 2) == 0) rank.speed = 0.5;
    if (unequal && pick(rng, 0, 3) == 0) rank.memory = Bytes{500};
  }
  cluster.between_nodes = {.latency_s = 1e-4 * rng.uniform(), .bandwidth_bytes_per_s = 1e6};
  if (pick(rng, 0, 2) == 0) cluster.inside_node.latency_s = 1e-5;
  if (pick(rng, 0, 1) == 0) put_on_switches(rng, cluster);
  return cluster;
}

std::vector<Rank> identity(int ranks) {
  std::vector<Rank> order;
  for (std::int32_t r = 0; r < ranks; ++r) order.emplace_back(r);
  return order;
}

std::optional<Nanoseconds> step_of(const Plan& plan, const BalanceProblem& problem) {
  const auto evaluation = evaluate(plan, problem).value();
  if (!fits_memory(evaluation.result, problem.cluster)) return std::nullopt;
  return evaluation.result.step_time;
}

TEST(Place, IsTheBestOfAllOrders) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x914CE, seed}));
    // All orders of 8 ranks are 40,320 replays here: few of them.
    const int most = draws_all_samples() ? 8 : 6;
    const int ranks = seed % 100 == 0 ? most : seed % 20 == 0 ? most - 1 : pick(rng, 1, 5);
    const cost::ModelCost model = model_with_messages(rng, 2 * ranks + pick(rng, 0, 4));
    const cost::Cluster cluster = mixed_cluster(rng, ranks);
    const ScheduleKind kinds[] = {ScheduleKind::k1F1B, ScheduleKind::kGpipe, ScheduleKind::kZbV,
                                  ScheduleKind::kInterleaved};
    const ScheduleKind kind = kinds[pick(rng, 0, 3)];
    const int micro_batches = ranks > 6 ? ranks : ranks * pick(rng, 1, 2);
    const cost::Cluster roomy = cost::equal_ranks(ranks);
    const auto cut = propose(Balancer::kTime, {{model, roomy, micro_batches}, kind});
    if (!cut) continue;
    const Plan& plan = cut->plan;
    const Plan current = renamed(plan, [&] {
      std::vector<Rank> order = identity(ranks);
      std::reverse(order.begin(), order.end());
      return order;
    }());
    const BalanceProblem problem{{model, cluster, micro_batches}, kind, 2, &current};
    std::optional<std::pair<Nanoseconds, Bytes>> best;
    std::vector<Rank> order = identity(ranks);
    do {
      const Plan other = renamed(plan, order);
      const auto step = step_of(other, problem);
      if (!step) continue;
      const std::pair found(*step, difference(current, other, model).bytes());
      if (!best || found < *best) best = found;
    } while (std::next_permutation(order.begin(), order.end()));
    const Plan placed = place(plan, problem).value();
    if (!best) {
      EXPECT_EQ(placed, plan) << "seed " << seed;
      continue;
    }
    ASSERT_EQ(step_of(placed, problem), best->first) << "seed " << seed << ", ranks " << ranks;
    ASSERT_EQ(difference(current, placed, model).bytes(), best->second) << "seed " << seed;
    EXPECT_EQ(place(plan, problem).value(), placed);
  }
}

TEST(Place, ManyRanksAreNeverWorseThanInTheirGivenOrder) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Rng rng(mix_key({0x914CF, seed}));
    const int ranks = seed % 10 == 0 ? 64 : pick(rng, 9, 24);
    const cost::ModelCost model = model_with_messages(rng, 2 * ranks + pick(rng, 0, 9));
    cost::Cluster cluster = mixed_cluster(rng, ranks);
    for (cost::ClusterRank& rank : cluster.ranks) rank.node = pick(rng, 0, ranks / 4);
    if (cluster.between_switches || seed % 3 == 0) put_on_switches(rng, cluster);
    const ScheduleKind kind = seed % 2 == 0 ? ScheduleKind::k1F1B : ScheduleKind::kZbV;
    const cost::Cluster roomy = cost::equal_ranks(ranks);
    const Plan plan = propose(Balancer::kTime, {{model, roomy, ranks}, kind}).value().plan;
    const BalanceProblem problem{{model, cluster, ranks}, kind};
    const Plan placed = place(plan, problem).value();
    const auto given = step_of(plan, problem);
    const auto step = step_of(placed, problem);
    if (given) {
      ASSERT_TRUE(step) << "seed " << seed;
      ASSERT_LE(*step, *given) << "seed " << seed;
    }
    for (std::size_t s = 0; s < plan.stages.size(); ++s) {
      ASSERT_EQ(placed.stages[s].layers, plan.stages[s].layers);
      ASSERT_EQ(cluster.ranks[placed.stages[s].rank.index()].speed,
                cluster.ranks[plan.stages[s].rank.index()].speed);
    }
  }
}

// Ranks on nodes A B C .. A B C ..: a chain of stages need leave each node once only.
TEST(Place, AChainCrossesEveryNodeOnce) {
  for (const int nodes : {2, 4, 16}) {
    const int ranks = 4 * nodes;
    cost::ModelCost model = equal_model(ranks, 1e-3);
    for (cost::LayerCost& layer : model.layers) layer.boundary_bytes = Bytes{1000};
    cost::Cluster cluster = cost::equal_ranks(ranks);
    for (int r = 0; r < ranks; ++r) cluster.ranks[static_cast<std::size_t>(r)].node = r % nodes;
    cluster.between_nodes = {.latency_s = 1e-4, .bandwidth_bytes_per_s = 1e7};
    const Plan plan =
        make_plan(std::vector<int>(static_cast<std::size_t>(ranks), 1), ScheduleKind::k1F1B);
    const Plan placed = place(plan, {{model, cluster, 8}, ScheduleKind::k1F1B}).value();
    // An activation and a gradient a micro-batch.
    EXPECT_EQ(between_nodes(traffic_of(placed, model, 8), cluster).messages, 16 * (nodes - 1));
    EXPECT_EQ(between_nodes(traffic_of(plan, model, 8), cluster).messages, 16 * (ranks - 1));
  }
}

// Nodes A B C D .. on switches 0 1 0 1 ..: the chain need leave each switch once, too.
TEST(Place, AChainCrossesEverySwitchOnce) {
  const int ranks = 64;
  cost::ModelCost model = equal_model(ranks, 1e-3);
  for (cost::LayerCost& layer : model.layers) layer.boundary_bytes = Bytes{1000};
  cost::Cluster cluster = cost::equal_ranks(ranks);
  for (int r = 0; r < ranks; ++r) {
    cost::ClusterRank& rank = cluster.ranks[static_cast<std::size_t>(r)];
    rank.node = r % 16;
    rank.network_switch = rank.node % 4;
  }
  cluster.between_nodes = {.latency_s = 1e-4, .bandwidth_bytes_per_s = 1e7};
  cluster.between_switches = cost::Link{.latency_s = 1e-3, .bandwidth_bytes_per_s = 1e6};
  const Plan plan =
      make_plan(std::vector<int>(static_cast<std::size_t>(ranks), 1), ScheduleKind::k1F1B);
  const Plan placed = place(plan, {{model, cluster, 8}}).value();
  int nodes = 0;
  int switches = 0;
  for (std::size_t s = 1; s < placed.stages.size(); ++s) {
    const auto& before = cluster.ranks[placed.stages[s - 1].rank.index()];
    const auto& here = cluster.ranks[placed.stages[s].rank.index()];
    nodes += before.node != here.node ? 1 : 0;
    switches += before.network_switch != here.network_switch ? 1 : 0;
  }
  EXPECT_EQ(nodes, 15);
  EXPECT_EQ(switches, 3);
}

TEST(Place, OfEquallyGoodOrdersThatInForceStays) {
  for (const int ranks : {8, 16}) {
    const cost::ModelCost model = equal_model(2 * ranks, 1e-3);
    cost::Cluster cluster = cost::equal_nodes(ranks / 4, 4);
    cluster.between_nodes.latency_s = 1e-4;
    const Plan plan =
        make_plan(std::vector<int>(static_cast<std::size_t>(ranks), 2), ScheduleKind::k1F1B);
    std::vector<Rank> order;  // the last node first, each from behind
    for (std::int32_t r = ranks; r-- > 0;) order.emplace_back(r);
    const Plan current = renamed(plan, order);
    const BalanceProblem problem{{model, cluster, 8}, ScheduleKind::k1F1B, 2, &current};
    EXPECT_EQ(place(plan, problem).value(), current);
    const Proposal again =
        propose(Balancer::kUniform, problem, {.rank_order = RankOrder::kBest}).value();
    EXPECT_EQ(again.plan, current);
  }
}

TEST(Place, ABalancerSeesTheRanksOfANodeTogether) {
  for (const Balancer balancer :
       {Balancer::kUniform, Balancer::kOptimal, Balancer::kDiffusionTime, Balancer::kSearch}) {
    cost::ModelCost model = equal_model(12, 1e-3);
    for (cost::LayerCost& layer : model.layers) layer.boundary_bytes = Bytes{4000};
    cost::Cluster together = cost::equal_nodes(2, 2);
    together.between_nodes = {.latency_s = 1e-4, .bandwidth_bytes_per_s = 1e6};
    cost::Cluster mixed = together;  // A B A B
    std::swap(mixed.ranks[1], mixed.ranks[2]);
    const ProposeOptions best{
        .schedules = ScheduleChoice::kBest, .rank_order = RankOrder::kBest, .evaluations = 200};
    const Proposal ordered = propose(balancer, {{model, together, 8}}, best).value();
    const Proposal placed = propose(balancer, {{model, mixed, 8}}, best).value();
    EXPECT_EQ(placed.evaluation.result.step_time, ordered.evaluation.result.step_time)
        << name(balancer);
    const Proposal given = propose(balancer, {{model, mixed, 8}},
                                   {.schedules = ScheduleChoice::kBest, .evaluations = 200})
                               .value();
    EXPECT_LT(placed.evaluation.step_time_s, given.evaluation.step_time_s) << name(balancer);
  }
}

TEST(Place, TheBestOfNodesIsTheGivenOrderOnOne) {
  const cost::Cluster one = cost::equal_ranks(4);
  cost::Cluster two = one;
  two.ranks[2].node = 1;
  for (const RankOrder order : {RankOrder::kKeep, RankOrder::kPermuteEqual, RankOrder::kBest}) {
    EXPECT_EQ(rank_order_in(one, order), order);
    EXPECT_EQ(rank_order_in(two, order), order);
  }
  EXPECT_EQ(rank_order_in(one, RankOrder::kBestOfNodes), RankOrder::kKeep);
  EXPECT_EQ(rank_order_in(two, RankOrder::kBestOfNodes), RankOrder::kBest);
}

TEST(Place, TriesOrdersWithTheLayersThatThePlanRunsAgain) {
  cost::ModelCost model = equal_model(5, 1e-3);
  for (cost::LayerCost& layer : model.layers) {
    layer.parameter_bytes = layer.gradient_bytes = layer.optimizer_bytes = Bytes{};
    layer.boundary_bytes = Bytes{1};
  }
  cost::Cluster cluster = cost::equal_ranks(4, Bytes{350});
  BalanceProblem problem{{model, cluster, 8}};
  problem.recompute = Recompute::kAuto;
  const Plan cut = propose(Balancer::kUniform, problem).value().plan;
  const auto heaviest = std::ranges::max_element(
      cut.stages, {}, [](const PlanStage& stage) { return stage.layers.count; });
  cluster.ranks[heaviest->rank.index()].speed = 0.5;
  BalanceProblem uneven{{model, cluster, 8}};
  uneven.recompute = Recompute::kAuto;
  const auto kept = propose(Balancer::kUniform, uneven, {.rank_order = RankOrder::kKeep}).value();
  const auto placed = propose(Balancer::kUniform, uneven, {.rank_order = RankOrder::kBest}).value();
  ASSERT_FALSE(placed.recomputed.empty());
  EXPECT_TRUE(fits_memory(placed.evaluation.result, cluster));
  EXPECT_LT(placed.evaluation.step_time_s, 0.8 * kept.evaluation.step_time_s);
}

TEST(Place, ARankDoesNotChangePlacesForLittle) {
  const cost::ModelCost model = equal_model(8, 1e-3);
  cost::Cluster cluster = cost::equal_ranks(4);
  cluster.ranks[1].node = cluster.ranks[3].node = 1;
  cluster.between_nodes.latency_s = 1e-6;  // of steps of milliseconds
  const Plan current = make_plan({2, 2, 2, 2}, ScheduleKind::k1F1B);
  const BalanceProblem problem{{model, cluster, 8}, ScheduleKind::k1F1B, 2, &current};
  EXPECT_NE(place(current, problem).value(), current);
  EXPECT_EQ(propose(Balancer::kSearch, problem, {.rank_order = RankOrder::kBest, .evaluations = 20})
                .value()
                .plan.stages,
            current.stages);
}

}  // namespace
}  // namespace dynmo::plan
