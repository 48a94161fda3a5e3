// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/hosts.h"

#include <gtest/gtest.h>

#include "dynmo/cost/files.h"
#include "dynmo/transport/in_process.h"
#include "dynmo/transport/tags.h"

namespace dynmo::transport {
namespace {

TEST(Hosts, PositionsShareANodeWhereTheyShareAHostInEveryReplica) {
  const auto nodes = [](std::vector<std::string> hosts, int positions) {
    return nodes_of(hosts, positions);
  };
  EXPECT_EQ(nodes({"a", "b", "a", "b"}, 4), (std::vector{0, 1, 0, 1}));
  EXPECT_EQ(nodes({"a", "a", "a", "a"}, 4), (std::vector{0, 0, 0, 0}));
  EXPECT_EQ(nodes({"a", "a", "b", "b"}, 2), (std::vector{0, 0}));
  EXPECT_EQ(nodes({"a", "a", "b", "c"}, 2), (std::vector{0, 1}));
  EXPECT_EQ(nodes({"x", "y", "y", "x", "y", "y"}, 3), (std::vector{0, 1, 1}));
}

TEST(Hosts, AllRanksGetTheSameClusterWithMeasuredLinks) {
  std::vector<Json> clusters(4);
  const auto status = run_ranks(4, [&](Transport& group) -> Expected<void> {
    const std::string host = group.rank().value % 2 == 0 ? "even" : "odd";
    DYNMO_ASSIGN(const cost::Cluster cluster, measured_cluster(group, host, 1, Bytes{1000}));
    clusters[group.rank().index()] = cost::cluster_json(cluster);
    for (std::size_t r = 0; r < 4; ++r) {
      EXPECT_EQ(cluster.ranks[r].node, static_cast<int>(r % 2));
      EXPECT_EQ(cluster.ranks[r].memory, Bytes{1000});
    }
    for (const cost::Link& link : {cluster.inside_node, cluster.between_nodes}) {
      EXPECT_GE(link.latency_s, 0);
      EXPECT_LT(link.latency_s, 1);
      EXPECT_GT(link.bandwidth_bytes_per_s, 1e5);
    }
    EXPECT_TRUE(cost::validate(cluster).has_value());
    return {};
  });
  ASSERT_TRUE(status.has_value()) << status.error().message;
  for (const Json& cluster : clusters) EXPECT_EQ(cluster, clusters.front());
}

TEST(Hosts, LinksThatARankKnowsAreNotMeasuredAgain) {
  cost::Cluster known = cost::equal_ranks(2);
  known.inside_node = {.latency_s = 1e-6, .bandwidth_bytes_per_s = 1e9};
  known.between_nodes = {.latency_s = 1e-3, .bandwidth_bytes_per_s = 1e6};
  const auto status = run_ranks(6, [&](Transport& group) -> Expected<void> {
    const int self = group.rank().value;
    // Two replicas; the first rank has come anew.
    DYNMO_ASSIGN(const cost::Cluster cluster,
                 measured_cluster(group, self % 3 == 2 ? "b" : "a", 2, cost::kUnlimitedMemory,
                                  self == 0 ? cost::Cluster{} : known));
    EXPECT_EQ(cluster.size(), 3);
    EXPECT_EQ(cluster.ranks[2].node, 1);
    EXPECT_EQ(cluster.inside_node, known.inside_node);
    EXPECT_EQ(cluster.between_nodes, known.between_nodes);
    EXPECT_EQ(cluster.nic_bandwidth_bytes_per_s, 1e6);
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
}

TEST(Hosts, OnOneHostNothingIsMeasured) {
  const auto status = run_ranks(3, [](Transport& group) -> Expected<void> {
    DYNMO_ASSIGN(const cost::Cluster cluster, measured_cluster(group, "a", 1, Bytes{5}));
    EXPECT_EQ(cluster, cost::equal_ranks(3, Bytes{5}));
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
}

}  // namespace
}  // namespace dynmo::transport
