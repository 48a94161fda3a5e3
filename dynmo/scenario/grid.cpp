// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/grid.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "dynmo/core/check.h"

namespace dynmo::scenario {
namespace {

cost::Link link_of(double latency_s, double bandwidth, const cost::Link& device) {
  return {.latency_s = latency_s > 0 ? latency_s : device.latency_s,
          .bandwidth_bytes_per_s = bandwidth > 0 ? bandwidth : device.bandwidth_bytes_per_s};
}

class Layout {
 public:
  Layout(const Scenario::Cluster& cluster, const cost::Device& device)
      : cluster_(cluster), slow_(cluster.slow_ranks.begin(), cluster.slow_ranks.end()) {
    base_.inside_node =
        link_of(cluster.inside_latency_s, cluster.inside_bandwidth, device.inside_node);
    base_.between_nodes =
        link_of(cluster.between_latency_s, cluster.between_bandwidth, device.between_nodes);
    if (cluster.nic_bandwidth > 0) {
      base_.nic_bandwidth_bytes_per_s = cluster.nic_bandwidth / replicas_on_a_node();
    }
    memory_ = cluster.memory > Bytes{0} ? cluster.memory : device.memory;
  }

  [[nodiscard]] cost::Cluster replica(int replica) const {
    cost::Cluster result = base_;
    int node = -1;
    std::int64_t before = -1;
    for (int position = 0; position < cluster_.pipeline_ranks; ++position) {
      const std::int64_t rank = number(replica, position);
      const std::int64_t on = rank / cluster_.ranks_per_node;
      if (on != before) ++node;  // numbers rise along the pipeline, so no node comes back
      before = on;
      result.ranks.push_back({.speed = slow_.contains(rank) ? cluster_.slow_speed : 1,
                              .memory = memory_,
                              .node = node});
    }
    return result;
  }

  [[nodiscard]] cost::Link reduction(int replicas) const {
    bool apart = false;
    for (int r = 1; r < replicas && !apart; ++r) {
      apart = number(r, 0) / cluster_.ranks_per_node != number(r - 1, 0) / cluster_.ranks_per_node;
    }
    cost::Link link = apart ? base_.between_nodes : base_.inside_node;
    if (apart && cluster_.nic_bandwidth > 0) {
      const std::int64_t ranks = std::int64_t{replicas} * cluster_.pipeline_ranks;
      const auto sharing =
          static_cast<double>(std::min<std::int64_t>(cluster_.ranks_per_node, ranks));
      link.bandwidth_bytes_per_s =
          std::min(link.bandwidth_bytes_per_s, cluster_.nic_bandwidth / sharing);
    }
    return link;
  }

 private:
  [[nodiscard]] std::int64_t number(int replica, int position) const {
    return cluster_.order == "pipeline" ? std::int64_t{replica} * cluster_.pipeline_ranks + position
                                        : std::int64_t{position} * cluster_.data_parallel + replica;
  }
  // Returns the largest number of replicas that have ranks on one node.
  [[nodiscard]] double replicas_on_a_node() const {
    const int ranks = cluster_.ranks_per_node;
    const int most = cluster_.order == "pipeline"
                         ? (ranks + cluster_.pipeline_ranks - 1) / cluster_.pipeline_ranks
                         : ranks;
    return std::min(most, cluster_.data_parallel);
  }

  const Scenario::Cluster& cluster_;
  std::unordered_set<std::int64_t> slow_;
  cost::Cluster base_;
  Bytes memory_;
};

// Returns a cluster with the slowest rank at each position, and a node boundary if any kind has
// one.
cost::Cluster worst_of(const std::vector<ReplicaKind>& kinds) {
  cost::Cluster worst = kinds.front().cluster;
  for (std::size_t i = 0; i < worst.ranks.size(); ++i) {
    bool boundary = false;
    for (const ReplicaKind& kind : kinds) {
      const auto& ranks = kind.cluster.ranks;
      worst.ranks[i].speed = std::min(worst.ranks[i].speed, ranks[i].speed);
      boundary = boundary || (i > 0 && ranks[i].node != ranks[i - 1].node);
    }
    worst.ranks[i].node = i == 0 ? 0 : worst.ranks[i - 1].node + (boundary ? 1 : 0);
  }
  return worst;
}

}  // namespace

Expected<Grid> make_grid(const Scenario::Cluster& cluster, const cost::Device& device,
                         int replicas) {
  DYNMO_CHECK(replicas >= 1 && replicas <= cluster.data_parallel, "1 to {} replicas, got {}",
              cluster.data_parallel, replicas);
  const Layout layout(cluster, device);
  Grid grid{.kinds = {}, .planned = {}, .replicas = replicas};
  for (int r = 0; r < replicas; ++r) {
    cost::Cluster replica = layout.replica(r);
    const auto same = std::find_if(grid.kinds.begin(), grid.kinds.end(),
                                   [&](const auto& kind) { return kind.cluster == replica; });
    if (same == grid.kinds.end()) {
      grid.kinds.push_back({.cluster = std::move(replica), .count = 1});
    } else {
      ++same->count;
    }
  }
  grid.planned = worst_of(grid.kinds);
  grid.planned.replicas = replicas;
  grid.planned.between_replicas = layout.reduction(replicas);
  DYNMO_TRY(cost::validate(grid.planned));
  return grid;
}

Grid slowed(Grid grid, const std::map<Rank, double>& speeds) {
  for (ReplicaKind& kind : grid.kinds) {
    for (const auto& [rank, speed] : speeds) kind.cluster.ranks[rank.index()].speed *= speed;
  }
  return grid;
}

cost::Cluster subset(const cost::Cluster& cluster, const std::vector<int>& ranks) {
  cost::Cluster result = cluster;
  result.ranks.clear();
  for (const int rank : ranks)
    result.ranks.push_back(cluster.ranks[static_cast<std::size_t>(rank)]);
  return result;
}

}  // namespace dynmo::scenario
