// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ranks of a data-parallel job of pipelines, as the clusters of its replicas. Equal replicas
// take equal time, so each kind is simulated once.

#include <map>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/scenario/scenario.h"

namespace dynmo::scenario {

struct ReplicaKind {
  cost::Cluster cluster;  // of the pipeline's ranks; nodes numbered in order of appearance
  int count = 0;
};

struct Grid {
  std::vector<ReplicaKind> kinds;
  // The cluster for the common plan of all replicas. At each position it has the slowest rank of
  // any replica, and a node boundary if any replica has one. It includes the replicas and the link
  // between them.
  cost::Cluster planned;
  int replicas = 0;
};

// Makes the grid of a job with `replicas` replicas. Links and memory that the scenario does not set
// are those of `device`. Returns kBadInput with the key for invalid links.
//
// Ranks are numbered position-first (order "pipeline": the ranks of a pipeline are neighbours) or
// replica-first ("data"). Each node has ranks_per_node of them. A node's card is shared evenly by
// the replicas that have ranks on it, and in the reduction by all its ranks.
[[nodiscard]] Expected<Grid> make_grid(const Scenario::Cluster& cluster, const cost::Device& device,
                                       int replicas);

// Returns the grid whose ranks at these positions compute at `speeds` x their speed, in every
// replica. Grid::planned stays.
[[nodiscard]] Grid slowed(Grid grid, const std::map<Rank, double>& speeds);

// Returns the cluster of some of its ranks, in order.
[[nodiscard]] cost::Cluster subset(const cost::Cluster& cluster, const std::vector<int>& ranks);

}  // namespace dynmo::scenario
