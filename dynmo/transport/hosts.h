// SPDX-License-Identifier: Apache-2.0
#pragma once

// The hosts of a group's ranks and the links inside and between hosts, as a cluster that plans are
// made for.

#include <span>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// The node of each position of a replica. Two positions share a node where their ranks share a host
// in every replica, so a message between two nodes leaves a host in one replica or more. Nodes are
// numbered by their first position. `hosts` is by world rank; requires a multiple of `positions`.
[[nodiscard]] std::vector<int> nodes_of(std::span<const std::string> hosts, int positions);

// The ranks of a replica on the nodes that follow from the hosts of all ranks. Where ranks are on
// several hosts, links are measured, one pair of ranks after the other while all others wait: a
// link inside a host, if one has two ranks, and one between two hosts, whose bandwidth also counts
// as that of a host's network card. `known`: the cluster of a group before, with links measured
// then; the first rank that has one gives them to all. On one host nothing is measured, and links
// are free.
//
// Called by all ranks of the group; the same cluster on all of them.
[[nodiscard]] Expected<cost::Cluster> measured_cluster(Transport& group, const std::string& host,
                                                       int replicas, Bytes memory,
                                                       const cost::Cluster& known = {});

// The link between this rank and a peer, which calls it at the same time: medians of round trips of
// two sizes. `asks`: of the two, the one that begins. Meaningful on that one.
[[nodiscard]] Expected<cost::Link> measured_link(Transport& group, Member peer, Tag tag, bool asks);

}  // namespace dynmo::transport
