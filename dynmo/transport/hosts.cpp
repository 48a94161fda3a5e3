// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/hosts.h"

#include <fmt/format.h>

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

// Returns the seconds of a message: half of a round trip.
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

// Returns whether a link has been measured. Otherwise it is free.
bool is_measured(const cost::Link& link) { return link != cost::Link{}; }

using Names = std::vector<std::string>;  // by rank

Names names_of(std::span<const Host> hosts) {
  Names names;
  for (const Host& host : hosts) names.push_back(host.name);
  return names;
}

// Two ranks share their host, only their switch, or neither.
enum class Shared { kHost, kSwitch, kNothing };

// Returns the first two ranks that share exactly `wanted`. `switches` may be empty: then all share
// one.
std::optional<std::pair<int, int>> first_pair(const Names& hosts, const Names& switches,
                                              Shared wanted) {
  const auto shared = [&](std::size_t i, std::size_t j) {
    if (hosts[i] == hosts[j]) return Shared::kHost;
    return switches.empty() || switches[i] == switches[j] ? Shared::kSwitch : Shared::kNothing;
  };
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    for (std::size_t j = i + 1; j < hosts.size(); ++j) {
      if (shared(i, j) == wanted) return std::pair(static_cast<int>(i), static_cast<int>(j));
    }
  }
  return std::nullopt;
}

// Measures the links that no rank has sent, one after another.
Expected<void> measure_missing(Transport& group, Tag tag, const Names& hosts, const Names& switches,
                               cost::Cluster& cluster) {
  std::vector<std::pair<Shared, cost::Link*>> links = {{Shared::kHost, &cluster.inside_node},
                                                       {Shared::kSwitch, &cluster.between_nodes}};
  if (cluster.between_switches) links.emplace_back(Shared::kNothing, &*cluster.between_switches);
  for (const auto& [shared, link] : links) {
    const auto pair = first_pair(hosts, switches, shared);
    if (is_measured(*link) || !pair) continue;
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
    *link = {.latency_s = measured[0], .bandwidth_bytes_per_s = measured[1]};
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

Expected<std::vector<std::string>> switches_of(std::span<const Host> hosts, int positions) {
  const auto levels = [](const Host& host) {
    return host.switches.empty() ? 0 : 1 + std::ranges::count(host.switches, '.');
  };
  std::map<std::string, const Host*> known;
  for (const Host& host : hosts) {
    if (levels(host) != levels(hosts.front())) {
      return make_error(ErrorCode::kBadInput,
                        "host '{}' is on switches '{}' and host '{}' on '{}', wanted as many",
                        hosts.front().name, hosts.front().switches, host.name, host.switches);
    }
    const Host& before = *known.try_emplace(host.name, &host).first->second;
    if (host.switches != before.switches) {
      return make_error(ErrorCode::kBadInput,
                        "host '{}' is on switches '{}' and on '{}', wanted one of them", host.name,
                        before.switches, host.switches);
    }
  }
  const auto groups = [&](const Names& names) {
    return std::ranges::max(nodes_of(names, positions)) + 1;
  };
  const int nodes = groups(names_of(hosts));
  Names names;
  for (const Host& host : hosts) names.push_back(host.switches);
  for (auto level = levels(hosts.front()); level > 0; --level) {
    const int switches = groups(names);
    if (switches > 1 && switches < nodes) return names;
    for (std::string& name : names) name.resize(level > 1 ? name.rfind('.') : 0);
  }
  return Names();
}

namespace {

// Returns the switches of all ranks by name. Returns none, and sets `note` to the reason, if a rank
// does not know its own.
Names known_switches(const Transport& group, std::span<const Host> hosts, int positions,
                     std::string& note) {
  std::string fault;
  for (std::size_t rank = 0; rank < hosts.size() && fault.empty(); ++rank) {
    if (hosts[rank].fault.empty()) continue;
    fault = fmt::format("rank {} has {}", group.number_of(Member(static_cast<int>(rank))),
                        hosts[rank].fault);
  }
  auto switches = fault.empty() ? switches_of(hosts, positions) : Names();
  if (!switches) fault = switches.error().message;
  if (fault.empty()) return *switches;
  note = fmt::format("cluster  {}; hosts are placed without their switches", fault);
  return {};
}

Expected<std::vector<Host>> read_hosts(const std::vector<Json>& all) {
  std::vector<Host> hosts;
  for (const Json& one : all) {
    if (!one.is_object()) return make_error(ErrorCode::kInternal, "{}: wanted its name", kOrigin);
    JsonObject object(one, kOrigin);
    object.ignore("links");
    hosts.push_back({.name = object.string("host"),
                     .switches = object.string("switches", ""),
                     .fault = object.string("fault", ""),
                     .device = object.string("device", ""),
                     .device_memory = object.bytes("device_memory", cost::kUnlimitedMemory)});
    DYNMO_TRY(object.finish());
  }
  return hosts;
}

// Returns the memory of each position: the least share of a device among its replicas.
std::vector<Bytes> device_shares(std::span<const Host> hosts, int positions) {
  std::map<std::pair<std::string, std::string>, std::int64_t> sharing;
  for (const Host& host : hosts) ++sharing[{host.name, host.device}];
  std::vector<Bytes> shares(static_cast<std::size_t>(positions), cost::kUnlimitedMemory);
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const Host& host = hosts[rank];
    if (host.device_memory == cost::kUnlimitedMemory) continue;
    Bytes& share = shares[rank % shares.size()];
    const std::int64_t ranks = sharing[{host.name, host.device}];
    share = std::min(share, Bytes{host.device_memory.value / ranks});
  }
  return shares;
}

}  // namespace

Expected<MeasuredCluster> measured_cluster(Transport& group, const Host& host, int replicas,
                                           Bytes memory, const cost::Cluster& known) {
  const Tag tag = control_tag(Control::kHosts);
  Json mine = {{"host", host.name}};
  if (!host.switches.empty()) mine["switches"] = host.switches;
  if (!host.fault.empty()) mine["fault"] = host.fault;
  if (!host.device.empty()) {
    mine["device"] = host.device;
    mine["device_memory"] = host.device_memory.value;
  }
  if (is_measured(known.between_nodes)) mine["links"] = cost::cluster_json(known);
  DYNMO_ASSIGN(const auto all, gather_json(group, tag, mine, kOrigin));
  DYNMO_ASSIGN(const std::vector<Host> hosts, read_hosts(all));
  const int positions = group.size() / replicas;
  MeasuredCluster result{.cluster = cost::equal_ranks(positions, memory), .note = {}};
  cost::Cluster& cluster = result.cluster;
  if (memory == cost::kUnlimitedMemory) {
    const std::vector<Bytes> shares = device_shares(hosts, positions);
    for (std::size_t p = 0; p < shares.size(); ++p) cluster.ranks[p].memory = shares[p];
  }
  const Names names = names_of(hosts);
  const std::vector<int> nodes = nodes_of(names, positions);
  for (std::size_t p = 0; p < nodes.size(); ++p) cluster.ranks[p].node = nodes[p];
  if (std::ranges::all_of(nodes, [](int node) { return node == 0; })) return result;
  const Names switches = known_switches(group, hosts, positions, result.note);
  if (!switches.empty()) {
    const std::vector<int> numbers = nodes_of(switches, positions);
    for (std::size_t p = 0; p < nodes.size(); ++p) cluster.ranks[p].network_switch = numbers[p];
    cluster.between_switches.emplace();
  }
  for (const Json& one : all) {
    if (!one.contains("links")) continue;
    DYNMO_ASSIGN(const cost::Cluster told, cost::parse_cluster(one["links"], kOrigin));
    cluster.inside_node = told.inside_node;
    // Links between hosts differ in meaning with and without switches.
    if (told.between_switches.has_value() == cluster.between_switches.has_value()) {
      cluster.between_nodes = told.between_nodes;
      cluster.between_switches = told.between_switches;
    }
    break;
  }
  DYNMO_TRY(measure_missing(group, tag, names, switches, cluster));
  cluster.nic_bandwidth_bytes_per_s = cluster.between_nodes.bandwidth_bytes_per_s;
  return result;
}

Expected<cost::Link> measured_link(Transport& group, Member peer, Tag tag, bool asks) {
  DYNMO_ASSIGN(const double small_s, message_s(group, peer, tag, asks, kSmall, kSmallTrips));
  DYNMO_ASSIGN(const double large_s, message_s(group, peer, tag, asks, kLarge, kLargeTrips));
  constexpr double kMore = kLarge - kSmall;
  // On a busy machine the large message may have been faster than the small one.
  const double bandwidth = kMore / std::max(large_s - small_s, 1e-9 * kMore / 100);
  return cost::Link{.latency_s = std::max(0.0, small_s - kSmall / bandwidth),
                    .bandwidth_bytes_per_s = bandwidth};
}

}  // namespace dynmo::transport
