// SPDX-License-Identifier: Apache-2.0
// Plans on clusters of three levels whose ranks come in any order, as JSON lines for
// bench/peers/place_compare.py: messages by pair of positions, where each rank is, the order that
// place() chooses and its CPU time.
//
//     place_cases [CASES]
#include <fmt/format.h>

#include <cstdlib>
#include <ctime>
#include <string>

#include "dynmo/core/json.h"
#include "dynmo/core/rng.h"
#include "dynmo/plan/place.h"
#include "dynmo/plan/propose.h"
#include "dynmo/plan/traffic.h"

namespace dynmo::plan {
namespace {

constexpr int kOfNode = 8;    // ranks
constexpr int kOfSwitch = 4;  // nodes
constexpr int kRepetitions = 5;

// Layers of unequal times. Boundaries are as large as a hidden value of few or many tokens, as
// behind early exits.
cost::ModelCost model_of(Rng& rng, int layers) {
  cost::ModelCost model{std::vector<cost::LayerCost>(static_cast<std::size_t>(layers))};
  double share = 1;
  for (cost::LayerCost& layer : model.layers) {
    layer.forward_s = layer.backward_input_s = layer.backward_weight_s =
        1e-3 * (0.5 + rng.uniform());
    layer.parameter_bytes = Bytes{1 << 20};
    if (rng.below(8) == 0) share *= 0.7 + 0.3 * rng.uniform();
    layer.boundary_bytes = Bytes{static_cast<std::int64_t>(share * (1 << 22)) + 1};
  }
  return model;
}

// Times of a message by level are 1 : 4 : 12, in latency and in bytes.
cost::Cluster cluster_of(Rng& rng, int ranks) {
  cost::Cluster cluster = cost::equal_nodes(ranks / kOfNode, kOfNode);
  for (cost::ClusterRank& rank : cluster.ranks) rank.network_switch = rank.node / kOfSwitch;
  for (std::size_t r = cluster.ranks.size(); r-- > 1;) {
    std::swap(cluster.ranks[r], cluster.ranks[rng.below(r + 1)]);
  }
  cluster.inside_node = {.latency_s = 2e-6, .bandwidth_bytes_per_s = 1.2e11};
  cluster.between_nodes = {.latency_s = 8e-6, .bandwidth_bytes_per_s = 3e10};
  cluster.between_switches = {.latency_s = 2.4e-5, .bandwidth_bytes_per_s = 1e10};
  return cluster;
}

Json case_of(std::uint64_t seed) {
  using schedule::ScheduleKind;
  Rng rng(mix_key({0x91ACE, seed}));
  const int ranks = seed % 2 == 0 ? 64 : 256;
  const ScheduleKind kinds[] = {ScheduleKind::k1F1B, ScheduleKind::kZbV,
                                ScheduleKind::kInterleaved};
  const ScheduleKind kind = kinds[seed / 2 % 3];
  const cost::ModelCost model = model_of(rng, 4 * ranks);
  const cost::Cluster cluster = cluster_of(rng, ranks);
  const cost::Cluster equal = cost::equal_ranks(ranks);
  const int micro_batches = ranks;
  const Plan plan = propose(Balancer::kTime, {model, equal, micro_batches, kind, 2}).value().plan;
  const BalanceProblem problem{{model, cluster, micro_batches}, kind, 2};
  Plan placed;
  std::vector<double> seconds;
  for (int i = 0; i < kRepetitions; ++i) {
    const std::clock_t start = std::clock();
    placed = place(plan, problem).value();
    seconds.push_back(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
  }
  Json json = {
      {"seed", seed}, {"ranks", ranks}, {"schedule", name(kind)}, {"place_cpu_s", seconds}};
  const auto link = [](const cost::Link& of) {
    return Json{of.latency_s, 1 / of.bandwidth_bytes_per_s};
  };
  json["links"] = {link(cluster.inside_node), link(cluster.between_nodes),
                   link(*cluster.between_switches)};
  for (const cost::ClusterRank& rank : cluster.ranks) {
    json["nodes"].push_back(rank.node);
    json["switches"].push_back(rank.network_switch);
  }
  for (const TrafficRow& row : traffic_of(plan, model, micro_batches)) {
    json["rows"].push_back(
        {row.from.value, row.to.value, row.count.messages, row.count.bytes.value});
  }
  std::vector<int> order(static_cast<std::size_t>(ranks), -1);
  for (std::size_t s = 0; s < plan.stages.size(); ++s) {
    order[plan.stages[s].rank.index()] = placed.stages[s].rank.value;
  }
  json["order"] = order;
  json["given_message_s"] = message_time_s(traffic_of(plan, model, micro_batches), cluster);
  json["message_s"] = message_time_s(traffic_of(placed, model, micro_batches), cluster);
  const auto step = [&](const Plan& one) {
    return evaluate(one, {model, cluster, micro_batches}).value().result.step_time.count();
  };
  json["given_step_ns"] = step(plan);
  json["step_ns"] = step(placed);
  return json;
}

}  // namespace
}  // namespace dynmo::plan

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 50;
  for (int seed = 0; seed < cases; ++seed) {
    fmt::print("{}\n", dynmo::plan::case_of(static_cast<std::uint64_t>(seed)).dump());
  }
  return 0;
}
