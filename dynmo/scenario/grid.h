// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ranks of a data-parallel job of pipelines, as the clusters its replicas run on. Equal
// replicas take equal time, so each kind is simulated once, however many there are.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/scenario/scenario.h"

namespace dynmo::scenario {

struct ReplicaKind {
  cost::Cluster cluster;  // of the pipeline's ranks; nodes numbered as they appear
  int count = 0;
};

struct Grid {
  std::vector<ReplicaKind> kinds;
  // One plan for all replicas must suit this cluster: at each position the slowest rank of any
  // replica, and a node boundary wherever any replica has one. Knows of the replicas and the link
  // between them.
  cost::Cluster planned;
  int replicas = 0;
};

// The links and memory of `device` where the scenario has none of its own.
//
// Ranks are numbered position-first (order "pipeline": the ranks of a pipeline are neighbours) or
// replica-first ("data"), ranks_per_node of them a node. A node's card is shared evenly by the
// replicas that have ranks on it, and in the reduction by all its ranks. `replicas` of the job's
// run. kBadInput naming the key, for links that make no sense.
[[nodiscard]] Expected<Grid> make_grid(const Scenario::Cluster& cluster, const cost::Device& device,
                                       int replicas);

// The cluster of some of its ranks, in order.
[[nodiscard]] cost::Cluster subset(const cost::Cluster& cluster, const std::vector<int>& ranks);

}  // namespace dynmo::scenario
