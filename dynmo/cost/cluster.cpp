// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/cluster.h"

#include <cmath>
#include <map>
#include <string_view>

#include "dynmo/core/check.h"

namespace dynmo::cost {
namespace {

Expected<void> validate(const Link& link, std::string_view name) {
  if (!std::isfinite(link.latency_s) || link.latency_s < 0) {
    return make_error(ErrorCode::kBadInput,
                      "links {}: latency_s is {}, wanted finite seconds of 0 or more", name,
                      link.latency_s);
  }
  if (!(link.bandwidth_bytes_per_s > 0)) {  // also refuses NaN; infinity is unlimited
    return make_error(ErrorCode::kBadInput,
                      "links {}: bandwidth_bytes_per_s is {}, wanted more than 0", name,
                      link.bandwidth_bytes_per_s);
  }
  return {};
}

}  // namespace

const Link& Cluster::link(Rank from, Rank to) const {
  DYNMO_CHECK(from.value >= 0 && from.value < size() && to.value >= 0 && to.value < size(),
              "ranks below {}, got {} and {}", size(), from, to);
  const ClusterRank& a = ranks[from.index()];
  const ClusterRank& b = ranks[to.index()];
  if (a.node == b.node) return inside_node;
  const bool is_far = between_switches && a.network_switch != b.network_switch;
  return is_far ? *between_switches : between_nodes;
}

std::vector<Link> Cluster::links() const {
  std::vector<Link> all = {inside_node, between_nodes};
  if (between_switches) all.push_back(*between_switches);
  return all;
}

Expected<void> validate(const Cluster& cluster) {
  if (cluster.ranks.empty()) {
    return make_error(ErrorCode::kBadInput, "the cluster has no ranks, wanted at least one");
  }
  std::map<int, int> switches;  // by node
  for (std::size_t i = 0; i < cluster.ranks.size(); ++i) {
    const ClusterRank& rank = cluster.ranks[i];
    const int first = switches.try_emplace(rank.node, rank.network_switch).first->second;
    if (rank.network_switch != first) {
      return make_error(ErrorCode::kBadInput,
                        "rank {}: node {} is on switch {}, wanted {} as of the ranks before it", i,
                        rank.node, rank.network_switch, first);
    }
    if (!std::isfinite(rank.speed) || rank.speed <= 0) {
      return make_error(ErrorCode::kBadInput,
                        "rank {}: speed is {}, wanted a finite number above 0", i, rank.speed);
    }
    if (rank.memory < Bytes{0}) {
      return make_error(ErrorCode::kBadInput, "rank {}: memory_bytes is {}, wanted 0 or more", i,
                        rank.memory.value);
    }
  }
  DYNMO_TRY(validate(cluster.inside_node, "inside_node"));
  DYNMO_TRY(validate(cluster.between_nodes, "between_nodes"));
  if (cluster.between_switches) {
    DYNMO_TRY(validate(*cluster.between_switches, "between_switches"));
  }
  DYNMO_TRY(validate(cluster.between_replicas, "between_replicas"));
  if (!std::isfinite(cluster.action_s) || cluster.action_s < 0) {
    return make_error(ErrorCode::kBadInput,
                      "the cluster: action_s is {}, wanted finite seconds of 0 or more",
                      cluster.action_s);
  }
  if (cluster.replicas < 1) {
    return make_error(ErrorCode::kBadInput, "the cluster has {} replicas, wanted at least one",
                      cluster.replicas);
  }
  if (!(cluster.nic_bandwidth_bytes_per_s > 0)) {
    return make_error(ErrorCode::kBadInput,
                      "links: nic_bandwidth_bytes_per_s is {}, wanted more than 0",
                      cluster.nic_bandwidth_bytes_per_s);
  }
  return {};
}

Cluster equal_ranks(int ranks, Bytes memory) {
  DYNMO_CHECK(ranks >= 0, "a number of ranks, got {}", ranks);
  Cluster cluster;
  cluster.ranks.assign(static_cast<std::size_t>(ranks), ClusterRank{.memory = memory});
  return cluster;
}

Cluster equal_nodes(int nodes, int ranks_per_node, Bytes memory) {
  DYNMO_CHECK(nodes >= 0 && ranks_per_node >= 0, "numbers of nodes and ranks, got {} and {}", nodes,
              ranks_per_node);
  Cluster cluster = equal_ranks(nodes * ranks_per_node, memory);
  for (int r = 0; r < cluster.size(); ++r) {
    cluster.ranks[static_cast<std::size_t>(r)].node = r / ranks_per_node;
  }
  return cluster;
}

Cluster with_head_room(Cluster cluster, double share) {
  DYNMO_CHECK(share >= 0 && share < 1, "a share from 0 to 1, got {}", share);
  for (ClusterRank& rank : cluster.ranks) {
    if (rank.memory == kUnlimitedMemory) continue;
    const double free = static_cast<double>(rank.memory.value) * share;
    rank.memory -= Bytes{static_cast<std::int64_t>(std::ceil(free))};
  }
  return cluster;
}

}  // namespace dynmo::cost
