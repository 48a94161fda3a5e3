// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/hosts.h"

#include <gtest/gtest.h>

#include "dynmo/core/rng.h"
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
    DYNMO_ASSIGN(const auto measured, measured_cluster(group, {host}, 1, Bytes{1000}));
    const cost::Cluster& cluster = measured.cluster;
    EXPECT_EQ(measured.note, "");
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
    DYNMO_ASSIGN(const auto measured,
                 measured_cluster(group, {self % 3 == 2 ? "b" : "a"}, 2, cost::kUnlimitedMemory,
                                  self == 0 ? cost::Cluster{} : known));
    const cost::Cluster& cluster = measured.cluster;
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
    DYNMO_ASSIGN(const auto measured, measured_cluster(group, {"a", "s0"}, 1, Bytes{5}));
    EXPECT_EQ(measured.cluster, cost::equal_ranks(3, Bytes{5}));
    EXPECT_EQ(measured.note, "");
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
}

// Two replicas of two positions: the first three ranks share a device, the last has one of its own.
TEST(Hosts, ADeviceIsSharedByItsRanks) {
  for (const Bytes given : {cost::kUnlimitedMemory, Bytes{77}}) {
    const auto status = run_ranks(4, [&](Transport& group) -> Expected<void> {
      const bool alone = group.rank().value == 3;
      const Host host{.name = "a", .device = alone ? "x:1" : "x:0", .device_memory = Bytes{300}};
      DYNMO_ASSIGN(const auto measured, measured_cluster(group, host, 2, given));
      const Bytes wanted = given == cost::kUnlimitedMemory ? Bytes{100} : given;
      for (const cost::ClusterRank& rank : measured.cluster.ranks) EXPECT_EQ(rank.memory, wanted);
      return {};
    });
    EXPECT_TRUE(status.has_value()) << status.error().message;
  }
  const auto status = run_ranks(2, [&](Transport& group) -> Expected<void> {
    const bool first = group.rank().value == 0;
    const Host host =
        first ? Host{.name = "a", .device = "x:0", .device_memory = Bytes{300}} : Host{.name = "b"};
    DYNMO_ASSIGN(const auto measured, measured_cluster(group, host, 1, cost::kUnlimitedMemory));
    EXPECT_EQ(measured.cluster.ranks[0].memory, Bytes{300});
    EXPECT_EQ(measured.cluster.ranks[1].memory, cost::kUnlimitedMemory);
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
}

// Random trees of switches. The oracle looks at pairs of nodes, level by level: a level counts
// where one pair shares a switch and another does not.
TEST(Hosts, SwitchesAreThoseOfTheLowestLevelThatTellsNodesApart) {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    Rng rng(mix_key({0x5317C4, seed}));
    const int levels = 1 + static_cast<int>(rng.below(3));
    const int positions = 1 + static_cast<int>(rng.below(6));
    const int replicas = 1 + static_cast<int>(rng.below(2));
    std::vector<Host> known;  // a switch has as many as three of the level below, or hosts
    for (int h = 0; h < 8; ++h) {
      Host host{.name = "host" + std::to_string(h)};
      for (int level = 0; level < levels; ++level) {
        const char* const dot = level > 0 ? "." : "";
        host.switches += dot + std::string("s") + std::to_string(rng.below(3));
      }
      known.push_back(host);
    }
    std::vector<Host> hosts;
    for (int r = 0; r < positions * replicas; ++r) hosts.push_back(known[rng.below(8)]);
    const auto shares = [&](int a, int b, auto what) {
      for (int r = 0; r < replicas; ++r) {
        const auto offset = static_cast<std::size_t>(r * positions);
        if (what(hosts[offset + static_cast<std::size_t>(a)]) !=
            what(hosts[offset + static_cast<std::size_t>(b)])) {
          return false;
        }
      }
      return true;
    };
    const auto host_name = [](const Host& host) { return host.name; };
    int wanted = 0;  // level, from the top; 0: none
    for (int level = levels; level > 0 && wanted == 0; --level) {
      const auto above = [level](const Host& host) {
        std::size_t end = 0;
        for (int i = 0; i < level; ++i) end = host.switches.find('.', end + 1);
        return host.switches.substr(0, end);
      };
      bool joins = false;
      bool parts = false;
      for (int a = 0; a < positions; ++a) {
        for (int b = 0; b < a; ++b) {
          const bool one = shares(a, b, above);
          joins = joins || (one && !shares(a, b, host_name));
          parts = parts || !one;
        }
      }
      if (!joins || !parts) continue;
      wanted = level;
      const auto found = switches_of(hosts, positions);
      ASSERT_TRUE(found.has_value()) << "seed " << seed;
      ASSERT_EQ(found->size(), hosts.size()) << "seed " << seed;
      for (std::size_t r = 0; r < hosts.size(); ++r) {
        EXPECT_EQ((*found)[r], above(hosts[r])) << "seed " << seed << ", rank " << r;
      }
    }
    const auto found = switches_of(hosts, positions);
    ASSERT_TRUE(found.has_value()) << "seed " << seed;
    EXPECT_EQ(found->empty(), wanted == 0) << "seed " << seed;
  }
}

TEST(Hosts, RanksAreOnTheirSwitchesAndLinksBetweenThemAreMeasured) {
  // Two replicas of four positions.
  const std::vector<Host> hosts = {{"a", "top.s1"}, {"b", "top.s0"}, {"c", "top.s1"},
                                   {"d", "top.s0"}, {"a", "top.s1"}, {"e", "top.s2"},
                                   {"c", "top.s1"}, {"f", "top.s2"}};
  std::vector<Json> clusters(hosts.size());
  const auto status = run_ranks(8, [&](Transport& group) -> Expected<void> {
    const Host& host = hosts[group.rank().index()];
    DYNMO_ASSIGN(const auto measured, measured_cluster(group, host, 2, Bytes{7}));
    const cost::Cluster& cluster = measured.cluster;
    EXPECT_EQ(measured.note, "");
    clusters[group.rank().index()] = cost::cluster_json(cluster);
    for (std::size_t p = 0; p < 4; ++p) {
      EXPECT_EQ(cluster.ranks[p].node, static_cast<int>(p));
      EXPECT_EQ(cluster.ranks[p].network_switch, static_cast<int>(p % 2));
    }
    EXPECT_GT(cluster.between_nodes.bandwidth_bytes_per_s, 1e5);
    EXPECT_TRUE(cluster.between_switches.has_value());
    if (!cluster.between_switches) return {};
    EXPECT_GT(cluster.between_switches->bandwidth_bytes_per_s, 1e5);
    EXPECT_LT(cluster.between_switches->bandwidth_bytes_per_s, 1e18);
    EXPECT_TRUE(cost::validate(cluster).has_value());
    // Nothing is measured anew in a group that knows all links; on one switch the level goes.
    cost::Cluster known = cluster;
    known.between_nodes = {.latency_s = 1, .bandwidth_bytes_per_s = 2};
    known.between_switches = {.latency_s = 3, .bandwidth_bytes_per_s = 4};
    DYNMO_ASSIGN(const auto again, measured_cluster(group, host, 2, Bytes{7}, known));
    EXPECT_EQ(again.cluster.between_nodes, known.between_nodes);
    EXPECT_EQ(again.cluster.between_switches, known.between_switches);
    DYNMO_ASSIGN(const auto one,
                 measured_cluster(group, {host.name, "top.s1"}, 2, Bytes{7}, known));
    EXPECT_FALSE(one.cluster.between_switches.has_value());
    EXPECT_NE(one.cluster.between_nodes, known.between_nodes);
    return {};
  });
  ASSERT_TRUE(status.has_value()) << status.error().message;
  for (const Json& cluster : clusters) EXPECT_EQ(cluster, clusters.front());
}

TEST(Hosts, WithoutGoodSwitchesNodesAreAllAlikeAndOneLineSaysWhy) {
  const auto noted = [](const std::vector<Host>& hosts) {
    std::vector<std::string> notes(hosts.size());
    const auto status =
        run_ranks(static_cast<int>(hosts.size()), [&](Transport& group) -> Expected<void> {
          DYNMO_ASSIGN(const auto measured,
                       measured_cluster(group, hosts[group.rank().index()], 1, Bytes{7}));
          EXPECT_FALSE(measured.cluster.between_switches.has_value());
          EXPECT_GT(measured.cluster.between_nodes.bandwidth_bytes_per_s, 1e5);
          for (const auto& rank : measured.cluster.ranks) EXPECT_EQ(rank.network_switch, 0);
          notes[group.rank().index()] = measured.note;
          return {};
        });
    EXPECT_TRUE(status.has_value()) << status.error().message;
    for (const std::string& note : notes) EXPECT_EQ(note, notes.front());
    return notes.front();
  };
  const std::string end = "; hosts are placed without their switches";
  EXPECT_EQ(noted({{"a", "s0"}, {"b", "s0"}, {"c"}, {"d", "s1"}}),
            "cluster  host 'a' is on switches 's0' and host 'c' on '', wanted as many" + end);
  EXPECT_EQ(noted({{"a", "s0"}, {"b", "s0"}, {"a", "s1"}}),
            "cluster  host 'a' is on switches 's0' and on 's1', wanted one of them" + end);
  EXPECT_EQ(noted({{"a", "s0"}, {"b", "", "a bad value"}, {"c", "s1"}}),
            "cluster  rank 1 has a bad value" + end);
  EXPECT_EQ(noted({{"a", "s0"}, {"b", "s1"}, {"c", "s2"}}), "");  // as between any nodes
  EXPECT_EQ(noted({{"a"}, {"b"}, {"c"}}), "");
}

}  // namespace
}  // namespace dynmo::transport
