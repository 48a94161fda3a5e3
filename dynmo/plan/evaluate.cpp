// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/evaluate.h"

#include <algorithm>
#include <numeric>

#include "dynmo/core/check.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/lowering.h"

namespace dynmo::plan {
namespace {

sim::StageCost stage_cost(const LayerRange& range, const cost::ModelCost& model, int frozen) {
  double forward = 0;
  double input_gradient = 0;
  double weight_gradient = 0;
  double update = 0;
  sim::StageCost cost;
  for (int i = range.first.value; i < range.end(); ++i) {
    const cost::LayerCost& layer = model.layers[static_cast<std::size_t>(i)];
    forward += layer.forward_s;
    cost.state += cost::state_bytes(layer);
    cost.boundary = layer.boundary_bytes;
    if (i < frozen) continue;
    input_gradient += layer.backward_input_s;
    cost.activation += layer.activation_bytes;
    if (layer.frozen) continue;
    weight_gradient += layer.backward_weight_s;
    update += layer.update_s;
  }
  cost.forward = to_nanoseconds(forward);
  cost.input_gradient = to_nanoseconds(input_gradient);
  cost.weight_gradient = to_nanoseconds(weight_gradient);
  cost.update = to_nanoseconds(update);
  return cost;
}

// Returns the bytes of the gradients that a stage's replicas reduce.
Bytes gradients_of(const LayerRange& range, const cost::ModelCost& model) {
  Bytes sum;
  for (int i = range.first.value; i < range.end(); ++i) {
    const cost::LayerCost& layer = model.layers[static_cast<std::size_t>(i)];
    if (!layer.frozen) sum += layer.gradient_bytes;
  }
  return sum;
}

// No replay can take longer than everything one after the other.
Expected<void> check_duration(const Costs& costs, std::size_t stages) {
  double slowest = costs.cluster.ranks.front().speed;
  for (const cost::ClusterRank& rank : costs.cluster.ranks) slowest = std::min(slowest, rank.speed);
  double work = 0;
  double largest = 0;
  for (const cost::LayerCost& layer : costs.model.layers) {
    work += layer.forward_s + layer.backward_input_s + layer.backward_weight_s + layer.update_s;
    largest = std::max(largest, static_cast<double>(layer.boundary_bytes.value));
  }
  double message = 0;
  for (const cost::Link& link : costs.cluster.links()) {
    message = std::max(message, link.latency_s + largest / link.bandwidth_bytes_per_s);
  }
  const double bound =
      costs.micro_batches * (work / slowest + 2 * message * static_cast<double>(stages));
  if (bound > 4e9) {  // 2^63 ns are 9.2e9 s
    return make_error(ErrorCode::kBadInput,
                      "a step of {} micro-batches would take up to {:.3g} s, wanted at most 4e9 s: "
                      "check the units of times, speeds and bandwidths",
                      costs.micro_batches, bound);
  }
  return {};
}

void add_measures(Evaluation& evaluation, const Plan& plan, const Costs& costs) {
  const std::vector<double> work = cost::layer_work_s(costs.model, costs.micro_batches);
  evaluation.ideal_step_time_s = ideal_step_s(costs);
  const std::vector<double> times = rank_times_s(plan, costs);
  evaluation.bottleneck_s = *std::max_element(times.begin(), times.end());
  const double mean = std::accumulate(times.begin(), times.end(), 0.0) / plan.ranks;
  evaluation.imbalance = mean > 0 ? evaluation.bottleneck_s / mean - 1 : 0;
  for (const PlanStage& stage : plan.stages) {
    const auto first = work.begin() + stage.layers.first.value;
    evaluation.stage_time_s.push_back(std::accumulate(first, first + stage.layers.count, 0.0) /
                                      costs.cluster.ranks[stage.rank.index()].speed);
  }
}

}  // namespace

std::vector<sim::StageCost> stage_costs(const Plan& plan, const cost::ModelCost& model) {
  DYNMO_CHECK(plan.layers() == model.size(), "a plan of {} layers, got {}", model.size(),
              plan.layers());
  const int frozen = model.frozen_layers();
  std::vector<sim::StageCost> costs;
  for (const PlanStage& stage : plan.stages) {
    costs.push_back(stage_cost(stage.layers, model, frozen));
  }
  return costs;
}

std::vector<sim::StageCost> stage_costs(const Plan& plan, const cost::ModelCost& model,
                                        const cost::Cluster& cluster) {
  std::vector<sim::StageCost> costs = stage_costs(plan, model);
  if (cluster.replicas == 1) return costs;
  for (std::size_t s = 0; s < costs.size(); ++s) {
    costs[s].reduction = sim::all_reduce_time(gradients_of(plan.stages[s].layers, model),
                                              cluster.replicas, cluster.between_replicas);
  }
  return costs;
}

double ideal_step_s(const Costs& costs) {
  double speeds = 0;
  for (const cost::ClusterRank& rank : costs.cluster.ranks) speeds += rank.speed;
  const std::vector<double> work = cost::layer_work_s(costs.model, costs.micro_batches);
  return costs.micro_batches * std::accumulate(work.begin(), work.end(), 0.0) / speeds;
}

std::vector<double> rank_times_s(const Plan& plan, const Costs& costs) {
  const std::vector<cost::ClusterRank>& ranks = costs.cluster.ranks;
  DYNMO_CHECK(plan.ranks == costs.cluster.size(), "a plan of {} ranks, got {}",
              costs.cluster.size(), plan.ranks);
  const std::vector<double> work = cost::layer_work_s(costs.model, costs.micro_batches);
  std::vector<double> times(ranks.size(), 0.0);
  for (const PlanStage& stage : plan.stages) {
    for (int i = stage.layers.first.value; i < stage.layers.end(); ++i) {
      times[stage.rank.index()] += work[static_cast<std::size_t>(i)];
    }
  }
  for (std::size_t r = 0; r < times.size(); ++r) times[r] /= ranks[r].speed;
  return times;
}

bool fits_memory(const sim::SimResult& result, const cost::Cluster& cluster) {
  for (std::size_t r = 0; r < result.ranks.size(); ++r) {
    if (result.ranks[r].peak_memory > cluster.ranks[r].memory) return false;
  }
  return true;
}

Expected<Evaluation> evaluate(const Plan& plan, const Costs& costs, sim::SimOptions options) {
  const auto& [model, cluster, micro_batches] = costs;
  DYNMO_TRY(cost::validate(model, micro_batches));
  DYNMO_TRY(cost::validate(cluster));
  DYNMO_TRY(validate(plan, model.size()));
  if (plan.ranks != cluster.size()) {
    return make_error(ErrorCode::kBadInput,
                      "the plan is for {} ranks, the cluster has {}: make a plan for this cluster",
                      plan.ranks, cluster.size());
  }
  DYNMO_TRY(check_duration(costs, plan.stages.size()));
  DYNMO_ASSIGN(const schedule::Schedule compute,
               schedule_of(plan, micro_batches, model.frozen_layers()));
  Evaluation evaluation;
  DYNMO_ASSIGN(
      evaluation.result,
      sim::simulate(schedule::lower(compute), stage_costs(plan, model, cluster), cluster, options));
  evaluation.step_time_s = to_seconds(evaluation.result.step_time);
  evaluation.micro_batches = micro_batches;
  evaluation.in_flight = schedule::in_flight(compute);
  add_measures(evaluation, plan, costs);
  return evaluation;
}

bool holds_both(const Plan& plan, const Migration& migration, const Costs& costs) {
  const std::vector<cost::ClusterRank>& ranks = costs.cluster.ranks;
  const bool limited = std::ranges::any_of(
      ranks, [](const cost::ClusterRank& rank) { return rank.memory < cost::kUnlimitedMemory; });
  if (!limited) return true;
  const auto evaluation = evaluate(plan, costs);
  if (!evaluation) return true;
  std::vector<Bytes> needed;
  for (const auto& rank : evaluation->result.ranks) needed.push_back(rank.peak_memory);
  for (const LayerMove& move : migration.moves) {
    needed[move.to.index()] += move.bytes + costs.model.layers[move.layer.index()].gradient_bytes;
  }
  for (std::size_t i = 0; i < needed.size(); ++i) {
    if (needed[i] > ranks[i].memory) return false;
  }
  return true;
}

Json plan_json(const Plan& plan, const Evaluation& evaluation, const cost::ModelCost& model,
               std::string_view balancer, const Migration& migration) {
  const std::vector<sim::StageCost> costs = stage_costs(plan, model);
  DYNMO_CHECK(evaluation.in_flight.size() == plan.stages.size(),
              "an evaluation of {} stages, got {}", plan.stages.size(),
              evaluation.in_flight.size());
  Json json = to_json(plan);
  for (std::size_t s = 0; s < plan.stages.size(); ++s) {
    const std::int64_t in_flight = evaluation.in_flight[s];
    Json& stage = json["stages"][s];
    stage["time_s"] = evaluation.stage_time_s[s];
    stage["memory_bytes"] = (costs[s].state + costs[s].activation * in_flight).value;
    stage["in_flight"] = in_flight;
  }
  Bytes peak;
  for (const sim::RankUsage& rank : evaluation.result.ranks) {
    peak = std::max(peak, rank.peak_activation);
  }
  json.update(
      {{"balancer", balancer},
       {"micro_batches", evaluation.micro_batches},
       {"step_time_s", evaluation.step_time_s},
       {"ideal_step_time_s", evaluation.ideal_step_time_s},
       {"bottleneck_s", evaluation.bottleneck_s},
       {"bubble", evaluation.result.bubble},
       {"imbalance", evaluation.imbalance},
       {"peak_activation_bytes", peak.value},
       {"migration", {{"layers", migration.moves.size()}, {"bytes", migration.bytes().value}}}});
  return json;
}

}  // namespace dynmo::plan
