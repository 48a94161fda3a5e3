// SPDX-License-Identifier: Apache-2.0
#pragma once

// The hosts of a group's ranks and the links inside and between hosts, as a cluster for which plans
// are made.

#include <span>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// The host of a rank, as far as the rank knows it.
struct Host {
  std::string name;
  // The switches from the top of the network down to the host, joined by '.', or empty if they are
  // not known.
  std::string switches = {};
  // The reason why the switches are not known, if the user should mend that.
  std::string fault = {};
  // The device of the rank, and what plans may fill of its memory. Ranks of a host that name the
  // same device share it. Empty on a CPU.
  std::string device = {};
  Bytes device_memory = cost::kUnlimitedMemory;
};

// Returns the node of each position of a replica. `hosts` is by world rank.
//
// Two positions share a node if their ranks share a host in every replica. So a message between two
// nodes leaves a host in one replica or more. Nodes are numbered by their first position. Requires
// a multiple of `positions` hosts.
[[nodiscard]] std::vector<int> nodes_of(std::span<const std::string> hosts, int positions);

// Returns the name of the switch above each rank's host. It is the switch of the lowest level on
// which some nodes share a switch and some do not. Returns an empty list if there is no such level,
// for example if nothing is known of any host.
//
// Returns kBadInput with names of hosts if one has several switches, or more levels than another.
[[nodiscard]] Expected<std::vector<std::string>> switches_of(std::span<const Host> hosts,
                                                             int positions);

struct MeasuredCluster {
  cost::Cluster cluster;
  // A line for the user about what to mend, or empty.
  std::string note;
};

// Builds the cluster of a replica. The hosts of all ranks decide the nodes. If all ranks know their
// switches, the switches are part of it, too. All ranks of the group call this function and get the
// same result.
//
// A rank has `memory`. If that is unlimited, it has its share of its device's memory. A position
// has the least of its replicas.
//
// If the ranks are on several hosts, links are measured. One pair of ranks measures at a time while
// all others wait. Up to three links are measured: one inside a host that has two ranks, one
// between two hosts, and one between two switches. The bandwidth between hosts also counts as that
// of a host's network card. On one host nothing is measured, and links are free.
//
// `known` is the cluster of an earlier group, with the links measured then. The first rank that has
// one sends them to all. Fails with kPeerLost.
[[nodiscard]] Expected<MeasuredCluster> measured_cluster(Transport& group, const Host& host,
                                                         int replicas, Bytes memory,
                                                         const cost::Cluster& known = {});

// Measures the link between this rank and a peer, which calls the function at the same time. The
// result has medians of round trips of two sizes. Exactly one of the two ranks passes `asks` and
// begins. The result is meaningful on that rank. Fails with kPeerLost.
[[nodiscard]] Expected<cost::Link> measured_link(Transport& group, Member peer, Tag tag, bool asks);

}  // namespace dynmo::transport
