// SPDX-License-Identifier: Apache-2.0
#pragma once

// The machines that a plan may use: ranks with relative speed and memory, and the links between
// them.

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/units.h"

namespace dynmo::cost {

inline constexpr Bytes kUnlimitedMemory{std::numeric_limits<std::int64_t>::max()};

struct ClusterRank {
  double speed = 1;  // a layer of t seconds takes t / speed
  Bytes memory = kUnlimitedMemory;
  int node = 0;
  int network_switch = 0;  // of its node
  friend bool operator==(const ClusterRank&, const ClusterRank&) = default;
};

// A message of b bytes takes latency_s + b / bandwidth_bytes_per_s.
struct Link {
  double latency_s = 0;
  double bandwidth_bytes_per_s = std::numeric_limits<double>::infinity();
  friend bool operator==(const Link&, const Link&) = default;
};

struct Cluster {
  std::vector<ClusterRank> ranks;
  Link inside_node;
  Link between_nodes;
  // Between nodes of different switches. If absent, `between_nodes` holds there, too.
  std::optional<Link> between_switches = {};
  // All ranks of a node share one network card for messages to other nodes, and queue for it
  // (docs/simulator.md). This is its bandwidth in each direction.
  double nic_bandwidth_bytes_per_s = std::numeric_limits<double>::infinity();
  // Overhead of an action: the time in which a rank begins it and posts its messages. It does not
  // depend on the rank's speed.
  double action_s = 0;
  // A data-parallel job has several replicas of the pipeline. The ranks that hold the same layers
  // sum up their gradients at the end of a step, over this link.
  int replicas = 1;
  Link between_replicas = {};

  [[nodiscard]] int size() const { return static_cast<int>(ranks.size()); }
  [[nodiscard]] const Link& link(Rank from, Rank to) const;
  [[nodiscard]] std::vector<Link> links() const;  // of all classes
  friend bool operator==(const Cluster&, const Cluster&) = default;
};

// Checks a cluster. Returns kBadInput with rank or link and field for no ranks or replicas, or a
// node on two switches. Speeds must be finite and above 0, and bandwidths above 0. Memory, latency
// and time of an action must be at least 0.
[[nodiscard]] Expected<void> validate(const Cluster& cluster);

// Returns a cluster of `ranks` equal ranks on one node, without latency and with unlimited
// bandwidth.
[[nodiscard]] Cluster equal_ranks(int ranks, Bytes memory = kUnlimitedMemory);

// Returns a cluster of nodes x ranks_per_node equal ranks, node by node, without latency and with
// unlimited bandwidth.
[[nodiscard]] Cluster equal_nodes(int nodes, int ranks_per_node, Bytes memory = kUnlimitedMemory);

// Returns the cluster with `share` of each rank's memory reserved, if it is limited. Requires 0 <=
// share < 1.
[[nodiscard]] Cluster with_head_room(Cluster cluster, double share);

}  // namespace dynmo::cost
