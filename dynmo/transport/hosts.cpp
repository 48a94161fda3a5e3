// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/hosts.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/json.h"
#include "dynmo/core/median.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/cost/files.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::transport {
namespace {

// A message of the large size takes a fifth of a second at 40 Mbit/s.
constexpr std::size_t kSmall = 64;
constexpr std::size_t kLarge = std::size_t{1} << 20;
constexpr int kSmallTrips = 9;
constexpr int kLargeTrips = 3;

const std::string kOrigin = "what a rank says of its host";

// Half of a round trip.
Expected<double> message_s(Transport& group, Member peer, Tag tag, bool asks, std::size_t bytes,
                           int trips) {
  const std::vector<std::byte> there(bytes);
  std::vector<std::byte> back(bytes);
  std::vector<double> seconds;
  for (int trip = 0; trip < trips; ++trip) {
    const auto start = std::chrono::steady_clock::now();
    const auto receive = group.receive(peer, tag, back);
    if (!asks) DYNMO_TRY(receive->wait());
    DYNMO_TRY(group.send(peer, tag, there)->wait());
    if (asks) DYNMO_TRY(receive->wait());
    seconds.push_back(seconds_since(start) / 2);
  }
  return median(std::move(seconds));
}

// A link that is not free has been measured.
bool is_measured(const cost::Link& link) { return link != cost::Link{}; }

// The first two ranks that share a host, or do not.
std::optional<std::pair<int, int>> first_pair(const std::vector<std::string>& hosts, bool share) {
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    for (std::size_t j = i + 1; j < hosts.size(); ++j) {
      if ((hosts[i] == hosts[j]) == share)
        return std::pair(static_cast<int>(i), static_cast<int>(j));
    }
  }
  return std::nullopt;
}

// Measures what no rank has told of, one link after the other.
Expected<void> measure_missing(Transport& group, Tag tag, const std::vector<std::string>& hosts,
                               cost::Cluster& cluster) {
  for (const bool inside : {true, false}) {
    cost::Link& link = inside ? cluster.inside_node : cluster.between_nodes;
    const auto pair = first_pair(hosts, inside);
    if (is_measured(link) || !pair) continue;
    const int self = group.rank().value;
    cost::Link mine;
    if (self == pair->first || self == pair->second) {
      const bool asks = self == pair->first;
      DYNMO_ASSIGN(mine,
                   measured_link(group, Member(asks ? pair->second : pair->first), tag, asks));
    }
    const std::array numbers = {mine.latency_s, mine.bandwidth_bytes_per_s};
    DYNMO_ASSIGN(const auto all, gather_numbers(group, tag, numbers));
    const auto& measured = all[static_cast<std::size_t>(pair->first)];
    link = {.latency_s = measured[0], .bandwidth_bytes_per_s = measured[1]};
  }
  return {};
}

}  // namespace

std::vector<int> nodes_of(std::span<const std::string> hosts, int positions) {
  const auto count = static_cast<std::size_t>(positions);
  DYNMO_CHECK(positions >= 1 && hosts.size() % count == 0,
              "hosts of a multiple of {} ranks, got {}", positions, hosts.size());
  std::map<std::vector<std::string>, int> known;
  std::vector<int> nodes;
  for (std::size_t position = 0; position < count; ++position) {
    std::vector<std::string> own;
    for (std::size_t rank = position; rank < hosts.size(); rank += count) {
      own.push_back(hosts[rank]);
    }
    nodes.push_back(
        known.try_emplace(std::move(own), static_cast<int>(known.size())).first->second);
  }
  return nodes;
}

Expected<cost::Cluster> measured_cluster(Transport& group, const std::string& host, int replicas,
                                         Bytes memory, const cost::Cluster& known) {
  const Tag tag = control_tag(Control::kHosts);
  Json mine = {{"host", host}};
  if (is_measured(known.between_nodes)) mine["links"] = cost::cluster_json(known);
  DYNMO_ASSIGN(const auto all, gather_json(group, tag, mine, kOrigin));
  std::vector<std::string> hosts;
  std::optional<cost::Cluster> told;
  for (const Json& one : all) {
    if (!one.is_object() || !one.contains("host") || !one["host"].is_string()) {
      return make_error(ErrorCode::kInternal, "{}: wanted its name", kOrigin);
    }
    hosts.push_back(one["host"].get<std::string>());
    if (told || !one.contains("links")) continue;
    DYNMO_ASSIGN(told, cost::parse_cluster(one["links"], kOrigin));
  }
  const int positions = group.size() / replicas;
  cost::Cluster cluster = cost::equal_ranks(positions, memory);
  const std::vector<int> nodes = nodes_of(hosts, positions);
  for (std::size_t p = 0; p < nodes.size(); ++p) cluster.ranks[p].node = nodes[p];
  if (std::ranges::all_of(nodes, [](int node) { return node == 0; })) return cluster;
  if (told) {
    cluster.inside_node = told->inside_node;
    cluster.between_nodes = told->between_nodes;
  }
  DYNMO_TRY(measure_missing(group, tag, hosts, cluster));
  cluster.nic_bandwidth_bytes_per_s = cluster.between_nodes.bandwidth_bytes_per_s;
  return cluster;
}

Expected<cost::Link> measured_link(Transport& group, Member peer, Tag tag, bool asks) {
  DYNMO_ASSIGN(const double small_s, message_s(group, peer, tag, asks, kSmall, kSmallTrips));
  DYNMO_ASSIGN(const double large_s, message_s(group, peer, tag, asks, kLarge, kLargeTrips));
  constexpr double kMore = kLarge - kSmall;
  // On a busy machine the large message may have been the faster one.
  const double bandwidth = kMore / std::max(large_s - small_s, 1e-9 * kMore / 100);
  return cost::Link{.latency_s = std::max(0.0, small_s - kSmall / bandwidth),
                    .bandwidth_bytes_per_s = bandwidth};
}

}  // namespace dynmo::transport
