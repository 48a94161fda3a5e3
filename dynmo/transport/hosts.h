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

// The host that a rank is on, as far as the rank knows it.
struct Host {
  std::string name;
  // The switches from the top of the network down to the host, joined by '.'; empty: not known.
  std::string switches = {};
  std::string fault = {};  // why the switches are not known, where that is to be mended
};

// The node of each position of a replica. Two positions share a node where their ranks share a host
// in every replica, so a message between two nodes leaves a host in one replica or more. Nodes are
// numbered by their first position. `hosts` is by world rank; requires a multiple of `positions`.
[[nodiscard]] std::vector<int> nodes_of(std::span<const std::string> hosts, int positions);

// The switch above each rank's host, by name: that of the lowest level on which some nodes share a
// switch and some do not. Empty where there is no such level, as where nothing is known of any
// host. kBadInput naming hosts: one has several switches, or more levels than another.
[[nodiscard]] Expected<std::vector<std::string>> switches_of(std::span<const Host> hosts,
                                                             int positions);

struct MeasuredCluster {
  cost::Cluster cluster;
  std::string note;  // a line for people about what is to be mended; empty: nothing
};

// The ranks of a replica on the nodes that follow from the hosts of all ranks, and on their
// switches where all ranks know them. Where ranks are on several hosts, links are measured, one
// pair of ranks after the other while all others wait: a link inside a host, if one has two ranks,
// one between two hosts, whose bandwidth also counts as that of a host's network card, and one
// between two switches. `known`: the cluster of a group before, with links measured then; the first
// rank that has one gives them to all. On one host nothing is measured, and links are free.
//
// Called by all ranks of the group; the same result on all of them.
[[nodiscard]] Expected<MeasuredCluster> measured_cluster(Transport& group, const Host& host,
                                                         int replicas, Bytes memory,
                                                         const cost::Cluster& known = {});

// The link between this rank and a peer, which calls it at the same time: medians of round trips of
// two sizes. `asks`: of the two, the one that begins. Meaningful on that one.
[[nodiscard]] Expected<cost::Link> measured_link(Transport& group, Member peer, Tag tag, bool asks);

}  // namespace dynmo::transport
