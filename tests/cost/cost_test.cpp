// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/core/check.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"

namespace dynmo::cost {
namespace {

LayerCost layer(bool frozen) {
  LayerCost cost;
  cost.forward_s = 1;
  cost.backward_input_s = 2;
  cost.backward_weight_s = 4;
  cost.update_s = 8;
  cost.parameter_bytes = Bytes{10};
  cost.gradient_bytes = Bytes{20};
  cost.optimizer_bytes = Bytes{40};
  cost.frozen = frozen;
  return cost;
}

TEST(LayerCost, WorkLeavesOutWhatDoesNotRun) {
  const ModelCost model{{layer(true), layer(true), layer(false), layer(true)}};
  EXPECT_EQ(model.frozen_layers(), 2);
  EXPECT_EQ(work_s(model, 0, 4), 1);              // frozen prefix: F
  EXPECT_EQ(work_s(model, 2, 4), 1 + 2 + 4 + 2);  // F, I, W and a quarter of the update
  EXPECT_EQ(work_s(model, 3, 4), 1 + 2);          // frozen behind a trained layer: F and I
  EXPECT_EQ(layer_work_s(model, 4), (std::vector<double>{1, 1, 9, 3}));
  EXPECT_THROW((void)work_s(model, 4, 4), CheckFailure);
}

TEST(LayerCost, AFrozenLayerHoldsItsParametersOnly) {
  EXPECT_EQ(state_bytes(layer(false)), Bytes{70});
  EXPECT_EQ(state_bytes(layer(true)), Bytes{10});
}

TEST(Cluster, LinksDependOnTheNodes) {
  Cluster cluster = equal_ranks(3);
  cluster.ranks[2].node = 1;
  cluster.between_nodes.latency_s = 1;
  EXPECT_EQ(cluster.link(Rank{0}, Rank{1}).latency_s, 0);
  EXPECT_EQ(cluster.link(Rank{1}, Rank{2}).latency_s, 1);
  EXPECT_EQ(cluster.link(Rank{2}, Rank{0}).latency_s, 1);
}

TEST(Cluster, LinksDependOnTheSwitchesOfTheNodes) {
  Cluster cluster = equal_nodes(4, 2);
  for (ClusterRank& rank : cluster.ranks) rank.network_switch = rank.node / 2;
  cluster.between_nodes.latency_s = 1;
  EXPECT_EQ(cluster.link(Rank{0}, Rank{7}).latency_s, 1);
  cluster.between_switches = Link{.latency_s = 2};
  EXPECT_EQ(cluster.link(Rank{0}, Rank{1}).latency_s, 0);
  EXPECT_EQ(cluster.link(Rank{0}, Rank{3}).latency_s, 1);
  EXPECT_EQ(cluster.link(Rank{3}, Rank{4}).latency_s, 2);
  EXPECT_EQ(cluster.links().size(), 3);
  EXPECT_TRUE(validate(cluster));
  cluster.between_switches->bandwidth_bytes_per_s = 0;
  EXPECT_NE(validate(cluster).error().message.find("between_switches"), std::string::npos);
  cluster.ranks[3].network_switch = 5;
  EXPECT_EQ(validate(cluster).error().message,
            "rank 3: node 1 is on switch 5, wanted 0 as of the ranks before it");
}

TEST(Cluster, EqualNodesHoldTheirRanksOneNodeAfterTheOther) {
  const Cluster cluster = equal_nodes(2, 3, Bytes{5});
  ASSERT_EQ(cluster.size(), 6);
  for (int r = 0; r < 6; ++r) {
    const ClusterRank& rank = cluster.ranks[static_cast<std::size_t>(r)];
    EXPECT_EQ(rank.node, r / 3);
    EXPECT_EQ(rank.memory, Bytes{5});
  }
  EXPECT_EQ(equal_nodes(1, 4), equal_ranks(4));
}

TEST(Cluster, FaultsNameTheirRankOrLink) {
  Cluster cluster = equal_ranks(2);
  EXPECT_TRUE(validate(cluster));
  for (const double bandwidth : {0.0, -1.0, std::nan("")}) {
    cluster.nic_bandwidth_bytes_per_s = bandwidth;
    EXPECT_NE(validate(cluster).error().message.find("nic_bandwidth_bytes_per_s"),
              std::string::npos);
  }
  cluster.between_nodes.bandwidth_bytes_per_s = std::nan("");
  EXPECT_NE(validate(cluster).error().message.find("between_nodes"), std::string::npos);
  cluster.ranks[1].speed = std::nan("");
  EXPECT_NE(validate(cluster).error().message.find("rank 1: speed is nan"), std::string::npos);
}

}  // namespace
}  // namespace dynmo::cost
