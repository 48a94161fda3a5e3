// SPDX-License-Identifier: Apache-2.0
// A cluster that is taken reads back as it was written, and a model is planned on it or refused.
#include "dynmo/cost/files.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

constexpr int kMaxRanks = 16;

void plan_on_it(const cost::Cluster& cluster) {
  cost::ModelCost model;
  for (int i = 0; i < cluster.size() + 3; ++i) {
    cost::LayerCost layer;
    layer.forward_s = 1e-3 * (i % 4);
    layer.backward_input_s = layer.backward_weight_s = 1e-3;
    layer.parameter_bytes = Bytes{1 << 20};
    layer.activation_bytes = Bytes{1 << 16};
    layer.boundary_bytes = Bytes{1 << 10};
    model.layers.push_back(layer);
  }
  const auto counts = plan::balance(plan::Balancer::kOptimal, {{model, cluster, 2}});
  if (!counts) {
    (void)refused(counts.error());
    return;
  }
  const auto evaluation =
      plan::evaluate(plan::make_plan(*counts, schedule::ScheduleKind::k1F1B), {model, cluster, 2});
  if (!evaluation) (void)refused(evaluation.error());
}

}  // namespace

Outcome run_target(std::string_view text) {
  const auto json = parse_json(text, "cluster.json");
  if (!json) return refused(json.error());
  const auto cluster = cost::parse_cluster(*json, "cluster.json");
  if (!cluster) return refused(cluster.error());
  const auto again = cost::parse_cluster(cost::cluster_json(*cluster), "again");
  DYNMO_CHECK(again.has_value() && *again == *cluster, "a cluster that reads back, got {}",
              cost::cluster_json(*cluster).dump());
  if (cluster->size() <= kMaxRanks) plan_on_it(*cluster);
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  cost::Cluster cluster = cost::equal_ranks(3, Bytes{std::int64_t{1} << 33});
  cluster.ranks[1].speed = 0.7;
  cluster.ranks[2].node = 1;
  cluster.inside_node = {.latency_s = 5e-6, .bandwidth_bytes_per_s = 1e11};
  cluster.between_nodes = {.latency_s = 2e-5, .bandwidth_bytes_per_s = 1.2e10};
  cost::Cluster levels = cost::equal_nodes(3, 2);
  for (cost::ClusterRank& rank : levels.ranks) rank.network_switch = rank.node / 2;
  levels.between_nodes = cluster.between_nodes;
  levels.between_switches = cost::Link{.latency_s = 1e-4, .bandwidth_bytes_per_s = 1e9};
  return {cost::cluster_json(cluster).dump(), cost::cluster_json(levels).dump(),
          cost::cluster_json(cost::equal_ranks(2)).dump(),
          R"({"format": "dynmo-cluster-1", "ranks": [{}, {"speed": 2}], "links": {}})"};
}

}  // namespace dynmo::fuzz
