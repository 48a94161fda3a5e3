// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/traffic.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <tuple>

#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/propose.h"
#include "dynmo/schedule/lowering.h"
#include "tests/plan/cuts.h"

namespace dynmo::plan {
namespace {

using schedule::ActionKind;
using schedule::ScheduleKind;

// The sends of a lowered schedule, one by one.
TrafficRows sends_of(const Plan& plan, const cost::ModelCost& model, int micro_batches) {
  const auto compute = schedule_of(plan, micro_batches, model.frozen_layers());
  const schedule::Schedule lowered = schedule::lower(compute.value());
  const std::vector<sim::StageCost> costs = stage_costs(plan, model);
  std::vector<TrafficRow> rows;
  for (std::size_t r = 0; r < lowered.ranks.size(); ++r) {
    for (const schedule::Action& action : lowered.ranks[r]) {
      const bool activation = action.kind == ActionKind::kSendActivation;
      if (!activation && action.kind != ActionKind::kSendGradient) continue;
      const std::size_t to = schedule::peer(action).stage.index();
      rows.push_back({WorldRank(static_cast<std::int32_t>(r)),
                      WorldRank(plan.stages[to].rank.value),
                      activation ? Purpose::kActivation : Purpose::kGradient,
                      {1, costs[std::min(to, action.stage.index())].boundary}});
    }
  }
  return sums_of(std::move(rows));
}

TEST(Traffic, IsWhatTheLoweredScheduleSends) {
  int plans = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x72AF, seed}));
    const int ranks = pick(rng, 1, 5);
    const cost::ModelCost model = random_model(rng, 2 * ranks + pick(rng, 0, 8));
    const int micro_batches = ranks * pick(rng, 1, 3);
    const cost::Cluster cluster = cost::equal_ranks(ranks);
    for (const schedule::KindTraits& kind : schedule::schedule_kinds()) {
      const auto proposal = propose(Balancer::kTime, {{model, cluster, micro_batches}, kind.kind});
      if (!proposal) continue;
      ++plans;
      ASSERT_EQ(traffic_of(proposal->plan, model, micro_batches),
                sends_of(proposal->plan, model, micro_batches))
          << "seed " << seed << ", " << kind.name;
    }
  }
  EXPECT_GT(plans, 1500);
}

// Every element of every gradient by itself: each replica but its own gives it to the one that
// sums it, which gives the sum to all others.
TEST(Traffic, ReductionsMoveEveryElementToItsReplicaAndItsSumBack) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(mix_key({0x72B0, seed}));
    const int replicas = pick(rng, 1, 5);
    const int ranks = pick(rng, 1, 4);
    cost::ModelCost model = equal_model(ranks + pick(rng, 0, 5), 1e-3);
    std::vector<int> counts(static_cast<std::size_t>(ranks), 1);
    counts.back() = model.size() - ranks + 1;
    const Plan plan = make_plan(counts, ScheduleKind::k1F1B);
    std::map<std::tuple<int, int>, std::int64_t> expected;
    for (int i = 0; i < model.size(); ++i) {
      cost::LayerCost& layer = model.layers[static_cast<std::size_t>(i)];
      layer.frozen = pick(rng, 0, 3) == 0;
      const int elements = pick(rng, 0, 40);
      layer.gradient_bytes = Bytes{4 * elements};
      if (layer.frozen) continue;
      const int position = plan.owner(LayerId{i}).value;
      for (int element = 0; element < elements; ++element) {
        int part = 0;
        while (elements * (part + 1) / replicas <= element) ++part;
        for (int other = 0; other < replicas; ++other) {
          if (other == part) continue;
          expected[{other * ranks + position, part * ranks + position}] += 4;
          expected[{part * ranks + position, other * ranks + position}] += 4;
        }
      }
    }
    std::map<std::tuple<int, int>, std::int64_t> predicted;
    for (const TrafficRow& row : traffic_of(plan, model, 4, replicas)) {
      if (row.purpose != Purpose::kReduction) continue;
      predicted[{row.from.value, row.to.value}] += row.count.bytes.value;
    }
    ASSERT_EQ(predicted, expected) << "seed " << seed;
  }
}

TEST(Traffic, AMigrationIsItsMovesOnEveryReplica) {
  cost::ModelCost model = equal_model(4, 1e-3);
  model.layers[1].parameter_bytes = Bytes{3 << 20};  // with its optimizer: 4 messages
  const Plan from = make_plan({1, 3}, ScheduleKind::k1F1B);
  const Plan to = make_plan({2, 2}, ScheduleKind::k1F1B);
  const Bytes bytes = moved_bytes(model.layers[1]) + Bytes{64};
  const TrafficRows expected = {{WorldRank(1), WorldRank(0), Purpose::kMigration, {2 + 4, bytes}},
                                {WorldRank(3), WorldRank(2), Purpose::kMigration, {2 + 4, bytes}}};
  EXPECT_EQ(traffic_of(difference(from, to, model), 2, 2), expected);
  EXPECT_TRUE(traffic_of(difference(from, from, model), 2, 2).empty());
}

TEST(Traffic, BetweenNodesIsTheSumOfWhatCrosses) {
  cost::ModelCost model = equal_model(4, 1e-3);
  for (cost::LayerCost& layer : model.layers) layer.boundary_bytes = Bytes{100};
  const Plan plan = make_plan({1, 1, 1, 1}, ScheduleKind::k1F1B);
  cost::Cluster cluster = cost::equal_nodes(2, 2);
  const TrafficRows rows = traffic_of(plan, model, 8, 2);
  EXPECT_EQ(between_nodes(rows, cluster), (MessageCount{16, Bytes{1600}}));
  cluster.ranks[1].node = 1;
  cluster.ranks[2].node = 0;  // A B A B
  EXPECT_EQ(between_nodes(rows, cluster), (MessageCount{48, Bytes{4800}}));
}

}  // namespace
}  // namespace dynmo::plan
