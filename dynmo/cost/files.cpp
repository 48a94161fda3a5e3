// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/files.h"

#include <cmath>
#include <limits>
#include <map>
#include <string>

namespace dynmo::cost {
namespace {

constexpr std::string_view kProfileFormat = "dynmo-profile-1";
constexpr std::string_view kClusterFormat = "dynmo-cluster-1";

double seconds(JsonObject& object, const std::string& key, std::optional<double> fallback = {}) {
  const double value = object.number(key, fallback);
  if (value < 0 || value > kMaxSeconds) {
    object.fail(key, fmt::format("is {}, wanted seconds from 0 to {}", value, kMaxSeconds));
  }
  return value;
}

Bytes amount(JsonObject& object, const std::string& key) {
  const Bytes value = object.bytes(key, Bytes{0});
  if (value > kMaxBytes)
    object.fail(key, fmt::format("is {}, wanted at most {}", value.value, kMaxBytes.value));
  return value;
}

LayerCost read_layer(JsonObject& object, std::size_t index) {
  LayerCost layer;
  layer.name = object.string("name", fmt::format("layers.{}", index));
  layer.forward_s = seconds(object, "forward_s");
  layer.backward_input_s = seconds(object, "backward_input_s");
  layer.backward_weight_s = seconds(object, "backward_weight_s");
  layer.update_s = seconds(object, "update_s", 0.0);
  layer.parameter_bytes = amount(object, "parameter_bytes");
  layer.gradient_bytes = amount(object, "gradient_bytes");
  layer.optimizer_bytes = amount(object, "optimizer_bytes");
  layer.copy_bytes = amount(object, "copy_bytes");
  layer.activation_bytes = amount(object, "activation_bytes");
  layer.boundary_bytes = amount(object, "boundary_bytes");
  layer.frozen = object.boolean("frozen", false);
  layer.product_time = object.number("product_time", 1.0);
  if (!(layer.product_time > 0 && layer.product_time <= 1)) {
    object.fail("product_time",
                fmt::format("is {}, wanted above 0, at most 1", layer.product_time));
  }
  return layer;
}

ClusterRank read_rank(JsonObject& object) {
  ClusterRank rank;
  rank.speed = object.number("speed", 1.0);
  // Relative to other ranks; beyond, times would not fit the simulator's nanoseconds.
  constexpr double kMinSpeed = 1e-6;
  constexpr double kMaxSpeed = 1e6;
  if (!(rank.speed >= kMinSpeed && rank.speed <= kMaxSpeed)) {
    object.fail("speed", fmt::format("is {}, wanted {} to {}", rank.speed, kMinSpeed, kMaxSpeed));
  }
  rank.memory = object.bytes("memory_bytes", kUnlimitedMemory);
  const auto number = [&](const char* key) {
    const std::int64_t read = object.integer(key, 0);
    if (read < 0 || read > std::numeric_limits<int>::max()) {
      object.fail(key, fmt::format("is {}, wanted a {} number, 0 or more", read, key));
    }
    return static_cast<int>(read);
  };
  rank.node = number("node");
  rank.network_switch = number("switch");
  return rank;
}

double bandwidth(JsonObject& object, const std::string& key) {  // unlimited if absent
  const double value = object.number(key, std::numeric_limits<double>::infinity());
  if (!(value > 0)) object.fail(key, fmt::format("is {}, wanted more than 0", value));
  return value;
}

Expected<Link> read_link(JsonObject& links, const std::string& key) {
  Link link;
  auto object = links.object(key);
  if (!object) return link;
  link.latency_s = seconds(*object, "latency_s", 0.0);
  link.bandwidth_bytes_per_s = bandwidth(*object, "bandwidth_bytes_per_s");
  DYNMO_TRY(object->finish());
  return link;
}

// Unlimited is absent: JSON has no infinity.
void add_bandwidth(Json& json, std::string_view key, double value) {
  if (std::isfinite(value)) json[std::string(key)] = value;
}

Json links_json(const Cluster& cluster) {
  const auto link = [](const Link& of) {
    Json json = {{"latency_s", of.latency_s}};
    add_bandwidth(json, "bandwidth_bytes_per_s", of.bandwidth_bytes_per_s);
    return json;
  };
  Json json = {{"inside_node", link(cluster.inside_node)},
               {"between_nodes", link(cluster.between_nodes)}};
  if (cluster.between_switches) json["between_switches"] = link(*cluster.between_switches);
  add_bandwidth(json, "nic_bandwidth_bytes_per_s", cluster.nic_bandwidth_bytes_per_s);
  return json;
}

}  // namespace

Expected<ModelCost> parse_profile(const Json& json, std::string_view origin) {
  JsonObject root(json, std::string(origin));
  root.expect_format(kProfileFormat);
  root.ignore("emulated");  // for people
  ModelCost model;
  auto layers = root.objects("layers");
  if (layers.empty()) root.fail("layers", "has no elements, wanted at least one layer");
  DYNMO_TRY(root.finish());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    model.layers.push_back(read_layer(layers[i], i));
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
  for (const LayerCost& layer : model.layers) {
    Json element = {{"name", layer.name},
                    {"forward_s", layer.forward_s},
                    {"backward_input_s", layer.backward_input_s},
                    {"backward_weight_s", layer.backward_weight_s}};
    if (layer.update_s != 0) element["update_s"] = layer.update_s;
    element["parameter_bytes"] = layer.parameter_bytes.value;
    element["gradient_bytes"] = layer.gradient_bytes.value;
    element["optimizer_bytes"] = layer.optimizer_bytes.value;
    if (layer.copy_bytes != Bytes{0}) element["copy_bytes"] = layer.copy_bytes.value;
    if (layer.product_time != 1) element["product_time"] = layer.product_time;
    element["activation_bytes"] = layer.activation_bytes.value;
    element["boundary_bytes"] = layer.boundary_bytes.value;
    element["frozen"] = layer.frozen;
    layers.push_back(std::move(element));
  }
  return {{"format", kProfileFormat}, {"layers", std::move(layers)}};
}

Expected<Cluster> parse_cluster(const Json& json, std::string_view origin) {
  JsonObject root(json, std::string(origin));
  root.expect_format(kClusterFormat);
  Cluster cluster;
  auto ranks = root.objects("ranks");
  if (ranks.empty()) root.fail("ranks", "has no elements, wanted at least one rank");
  auto links = root.object("links");
  DYNMO_TRY(root.finish());
  std::map<int, int> switches;  // by node
  for (JsonObject& object : ranks) {
    const ClusterRank rank = read_rank(object);
    const int wanted = switches.try_emplace(rank.node, rank.network_switch).first->second;
    if (rank.network_switch != wanted) {
      object.fail("switch", fmt::format("is {}, wanted {} as of the ranks of node {} before it",
                                        rank.network_switch, wanted, rank.node));
    }
    DYNMO_TRY(object.finish());
    cluster.ranks.push_back(rank);
  }
  if (links) {
    DYNMO_ASSIGN(cluster.inside_node, read_link(*links, "inside_node"));
    DYNMO_ASSIGN(cluster.between_nodes, read_link(*links, "between_nodes"));
    if (const auto found = json["links"].find("between_switches"); found != json["links"].end()) {
      DYNMO_ASSIGN(cluster.between_switches, read_link(*links, "between_switches"));
    }
    cluster.nic_bandwidth_bytes_per_s = bandwidth(*links, "nic_bandwidth_bytes_per_s");
    DYNMO_TRY(links->finish());
  }
  return cluster;
}

Expected<Cluster> read_cluster(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const Json json, read_json(path));
  return parse_cluster(json, path.string());
}

Json cluster_json(const Cluster& cluster) {
  Json ranks = Json::array();
  for (const ClusterRank& rank : cluster.ranks) {
    Json element = {{"speed", rank.speed}};
    if (rank.memory != kUnlimitedMemory) element["memory_bytes"] = rank.memory.value;
    element["node"] = rank.node;
    if (rank.network_switch != 0) element["switch"] = rank.network_switch;
    ranks.push_back(std::move(element));
  }
  return {{"format", kClusterFormat}, {"ranks", std::move(ranks)}, {"links", links_json(cluster)}};
}

}  // namespace dynmo::cost
