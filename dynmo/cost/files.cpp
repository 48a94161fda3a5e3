// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/files.h"

#include <limits>
#include <map>
#include <string>

#include "dynmo/core/fields.h"

namespace dynmo::cost {
namespace {

constexpr std::string_view kProfileFormat = "dynmo-profile-1";
constexpr std::string_view kClusterFormat = "dynmo-cluster-1";

constexpr Limits kSeconds{.min = 0, .max = kMaxSeconds, .wanted = "seconds from 0 to 1000000"};
constexpr Limits kAmount{.max = static_cast<double>(kMaxBytes.value),
                         .wanted = "at most 1125899906842624"};
constexpr Limits kShare{.min = 0, .max = 1, .wanted = "above 0, at most 1", .above_min = true};
// Relative to other ranks; beyond, times would not fit the simulator's nanoseconds.
constexpr Limits kSpeed{.min = 1e-6, .max = 1e6, .wanted = "1e-06 to 1000000"};
constexpr Limits kNode{.min = 0, .wanted = "a node number, 0 or more"};
constexpr Limits kSwitch{.min = 0, .wanted = "a switch number, 0 or more"};
constexpr Limits kBandwidth{.min = 0, .wanted = "more than 0", .above_min = true};
constexpr double kUnlimited = std::numeric_limits<double>::infinity();  // absent: JSON has none

}  // namespace

void list_fields(IsA<LayerCost> auto& layer, auto& visit) {
  visit.optional("name", layer.name);
  visit("forward_s", layer.forward_s, kSeconds);
  visit("backward_input_s", layer.backward_input_s, kSeconds);
  visit("backward_weight_s", layer.backward_weight_s, kSeconds);
  visit.left_out("update_s", layer.update_s, 0, kSeconds);
  visit.optional("parameter_bytes", layer.parameter_bytes, kAmount);
  visit.optional("gradient_bytes", layer.gradient_bytes, kAmount);
  visit.optional("optimizer_bytes", layer.optimizer_bytes, kAmount);
  visit.left_out("copy_bytes", layer.copy_bytes, Bytes{0}, kAmount);
  visit.left_out("product_time", layer.product_time, 1, kShare);
  visit.optional("activation_bytes", layer.activation_bytes, kAmount);
  visit.optional("boundary_bytes", layer.boundary_bytes, kAmount);
  visit.optional("frozen", layer.frozen);
}

void list_fields(IsA<ClusterRank> auto& rank, auto& visit) {
  visit.optional("speed", rank.speed, kSpeed);
  visit.left_out("memory_bytes", rank.memory, kUnlimitedMemory);
  visit.optional("node", rank.node, kNode);
  visit.left_out("switch", rank.network_switch, 0, kSwitch);
}

void list_fields(IsA<Link> auto& link, auto& visit) {
  visit.optional("latency_s", link.latency_s, kSeconds);
  visit.left_out("bandwidth_bytes_per_s", link.bandwidth_bytes_per_s, kUnlimited, kBandwidth);
}

void list_fields(IsA<Cluster> auto& cluster, auto& visit) {
  visit.format(kClusterFormat);
  visit("ranks", cluster.ranks);
  visit.optional_group("links", [&](auto& links) {
    links.optional("inside_node", cluster.inside_node);
    links.optional("between_nodes", cluster.between_nodes);
    links("between_switches", cluster.between_switches);
    links.left_out("nic_bandwidth_bytes_per_s", cluster.nic_bandwidth_bytes_per_s, kUnlimited,
                   kBandwidth);
  });
}
void check_fields(const IsA<Cluster> auto& cluster, JsonObject& object) {
  if (cluster.ranks.empty()) {
    object.fail("ranks", "has no elements, wanted at least one rank");
  }
  std::map<int, int> switches;  // by node
  for (std::size_t r = 0; r < cluster.ranks.size(); ++r) {
    const ClusterRank& rank = cluster.ranks[r];
    const int wanted = switches.try_emplace(rank.node, rank.network_switch).first->second;
    if (rank.network_switch == wanted) continue;
    object.fail(fmt::format("ranks/{}/switch", r),
                fmt::format("is {}, wanted {} as of the ranks of node {} before it",
                            rank.network_switch, wanted, rank.node));
  }
}

Expected<ModelCost> parse_profile(const Json& json, std::string_view origin) {
  JsonObject root(json, std::string(origin));
  root.expect_format(kProfileFormat);
  root.ignore("emulated");  // for people
  ModelCost model;
  auto layers = root.objects("layers");
  if (layers.empty()) root.fail("layers", "has no elements, wanted at least one layer");
  DYNMO_TRY(root.finish());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    LayerCost& layer = model.layers.emplace_back();
    layer.name = fmt::format("layers.{}", i);
    read_list(layers[i], layer);
    DYNMO_TRY(layers[i].finish());
  }
  return model;
}

Expected<ModelCost> read_profile(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const Json json, read_json(path));
  return parse_profile(json, path.string());
}

Json profile_json(const ModelCost& model) {
  Json layers = Json::array();
  for (const LayerCost& layer : model.layers) layers.push_back(write_list(layer));
  return {{"format", kProfileFormat}, {"layers", std::move(layers)}};
}

Expected<Cluster> parse_cluster(const Json& json, std::string_view origin) {
  return parse_fields<Cluster>(json, origin);
}

Expected<Cluster> read_cluster(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const Json json, read_json(path));
  return parse_cluster(json, path.string());
}

Json cluster_json(const Cluster& cluster) { return write_list(cluster); }

}  // namespace dynmo::cost
