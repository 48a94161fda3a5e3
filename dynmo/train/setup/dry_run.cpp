// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/dry_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <typeinfo>
#include <utility>
#include <vector>

#include "dynmo/c10d/device_kinds.h"
#include "dynmo/config/config.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/model/layer.h"
#include "dynmo/observe/table.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/plan/traffic.h"
#include "dynmo/process/host_memory.h"
#include "dynmo/runtime/known_costs.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/setup/first_plan.h"
#include "dynmo/train/setup/pipeline_options.h"
#include "dynmo/train/setup/resolved_run.h"
#include "dynmo/train/setup/start.h"
#include "dynmo/transport/in_process.h"

namespace dynmo::train {
namespace {

struct DryRun {
  const ResolvedRun& run;
  runtime::PipelineOptions pipeline;  // as for a run
  cost::Cluster cluster;              // of a replica

  [[nodiscard]] const config::Config& config() const { return run.config(); }
  [[nodiscard]] const model::Model& layers() const { return run.model().layers; }
};

constexpr double kMaxMeasuring = 10;  // seconds
constexpr int kMicroBatches = 2;      // of a measured step
constexpr int kSteps = 4;             // the first one warms up

// Returns, for each layer, the index of the first layer of the same kind.
std::vector<std::size_t> kinds_of(const model::Model& layers) {
  std::map<std::string, std::size_t> first;
  std::vector<std::size_t> kinds;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const model::Layer& layer = *layers[i];
    std::string key = typeid(layer).name();
    for (const model::ParameterSpec& spec : layer.parameters()) {
      key += fmt::format(" {}{}", spec.name, fmt::join(spec.shape, "x"));
    }
    kinds.push_back(first.emplace(std::move(key), i).first->second);
  }
  return kinds;
}

Expected<cost::ModelCost> analytic_costs(const DryRun& dry_run) {
  const config::Config& config = dry_run.config();
  const cost::TransformerShape shape =
      config::transformer_shape(config, dry_run.run.batches().vocabulary());
  DYNMO_ASSIGN(cost::Device device, cost::find_device("cpu"));
  device.bytes_per_element = config.model.precision == "bf16" ? 2 : 4;
  return cost::transformer_costs(shape, device);
}

void take_times(cost::LayerCost& layer, const cost::LayerCost& from) {
  layer.forward_s = from.forward_s;
  layer.backward_input_s = from.backward_input_s;
  layer.backward_weight_s = from.backward_weight_s;
  layer.update_s = from.update_s;
  layer.activation_bytes = from.activation_bytes;
}

// Returns costs measured on one rank, by training a model of one layer of each kind for a few
// steps.
Expected<cost::ModelCost> measured_costs(const DryRun& dry_run, cost::ModelCost known,
                                         const std::vector<std::size_t>& kinds) {
  model::Model one_each;
  std::vector<std::size_t> place(kinds.size(), 0);
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] != i) continue;
    place[i] = one_each.size();
    one_each.push_back(dry_run.layers()[i]);
  }
  const auto group = transport::make_in_process_group(1);
  runtime::PipelineOptions options = dry_run.pipeline;
  options.make_sources = {};
  options.replicas = options.accumulation = 1;
  options.recompute = plan::Recompute::kNone;  // so that whole stashes are metered
  options.ties.clear();                        // their layers are not all in this model
  options.micro_batches = kMicroBatches;
  const auto plan =
      plan::make_plan({static_cast<int>(one_each.size())}, schedule::ScheduleKind::k1F1B);
  runtime::Pipeline pipeline(
      *group.front(), one_each, options,
      {plan, runtime::initial_states(one_each, plan, Rank(0), dry_run.pipeline.seed)});
  DYNMO_TRY(pipeline.measure(dry_run.run.training(), kSteps));
  const cost::ModelCost measured = *pipeline.costs();
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    take_times(known.layers[i], measured.layers[place[kinds[i]]]);
  }
  return known;
}

struct Costs {
  cost::ModelCost model;
  std::string source;
};

Expected<Costs> costs_of(const DryRun& dry_run) {
  cost::ModelCost known = runtime::known_costs(dry_run.layers(), dry_run.pipeline);
  const config::Config& config = dry_run.config();
  if (emulates(config)) {
    const cost::ModelCost& given = dry_run.run.model().first_costs;
    for (std::size_t i = 0; i < known.layers.size(); ++i) {
      take_times(known.layers[i], given.layers[i]);
    }
    return Costs{std::move(known),
                 fmt::format("EMULATED: {:g} x those of {}", config.emulated.time_scale,
                             config.emulated.profile.empty() ? config.emulated.trace
                                                             : config.emulated.profile)};
  }
  const std::vector<std::size_t> kinds = kinds_of(dry_run.layers());
  DYNMO_ASSIGN(const cost::ModelCost analytic, analytic_costs(dry_run));
  double seconds = 0;
  double bytes = 0;
  int layers = 0;
  const bool comparable = analytic.layers.size() == known.layers.size();
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] != i) continue;
    ++layers;
    // State, its copy for the update, and the draws of its initial values.
    bytes += 8.0 * static_cast<double>(known.layers[i].parameter_bytes.value);
    if (!comparable) continue;
    const cost::LayerCost& layer = analytic.layers[i];
    bytes += kMicroBatches * static_cast<double>(layer.activation_bytes.value);
    seconds += kSteps * (kMicroBatches *
                             (layer.forward_s + layer.backward_input_s + layer.backward_weight_s) +
                         layer.update_s);
  }
  const auto room = static_cast<double>(process::available_memory().value) / 2;
  if (!comparable || on_device(config) ||
      (seconds < kMaxMeasuring && (room == 0 || bytes < room))) {
    DYNMO_ASSIGN(cost::ModelCost measured, measured_costs(dry_run, std::move(known), kinds));
    return Costs{std::move(measured),
                 fmt::format("measured here, one layer of each of {} kinds by itself; ranks that "
                             "share a host are slower",
                             layers)};
  }
  for (std::size_t i = 0; i < known.layers.size(); ++i) {
    take_times(known.layers[i], analytic.layers[i]);
  }
  return Costs{std::move(known),
               "by formulas for the device preset 'cpu' (docs/costs.md): to measure them would "
               "take too long, or more than half of the free memory"};
}

struct Planned {
  plan::Plan plan;
  plan::Evaluation evaluation;
  int recomputed = 0;  // layers
};

Expected<Planned> plan_run(const config::Config& config, const cost::ModelCost& costs,
                           const cost::Cluster& cluster) {
  if (config.pipeline.cut.empty()) {
    DYNMO_ASSIGN(plan::Proposal proposed, propose_first_plan(config, costs, cluster));
    return Planned{std::move(proposed.plan), std::move(proposed.evaluation),
                   static_cast<int>(proposed.recomputed.size())};
  }
  const int micro_batches = static_cast<int>(config.batch.micro_batches);
  const std::vector<int> cut(config.pipeline.cut.begin(), config.pipeline.cut.end());
  plan::Plan plan = plan::make_plan(cut, first_schedule(config));
  DYNMO_TRY(plan::schedule_of(plan, micro_batches, 0));
  DYNMO_ASSIGN(plan, placed_by_hosts(plan, config, costs, cluster));
  const plan::Costs replayed{costs, cluster, micro_batches};
  DYNMO_ASSIGN(const plan::LayerSet again,
               plan::recomputed_layers(plan::parse_recompute(config.pipeline.recompute).value(),
                                       plan, replayed));
  DYNMO_ASSIGN(plan::Evaluation evaluation, plan::evaluate_recomputed(plan, replayed, again));
  return Planned{std::move(plan), std::move(evaluation), static_cast<int>(again.size())};
}

// Returns a table of state and stashes by rank. Compute copies of the parameters have a column if
// there are any.
std::string memory_table(const plan::Plan& plan, const cost::ModelCost& model,
                         const sim::SimResult& result) {
  const bool copies = std::ranges::any_of(
      model.layers, [](const cost::LayerCost& layer) { return layer.copy_bytes > Bytes{0}; });
  std::vector<std::vector<std::string>> rows;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    std::vector<std::string> layers;
    Bytes parameters, copied, gradients, optimizer, state;
    for (const plan::PlanStage& stage : plan.stages) {
      if (stage.rank != Rank(rank)) continue;
      layers.push_back(fmt::format("{}-{}", stage.layers.first.value, stage.layers.end() - 1));
      for (int i = stage.layers.first.value; i < stage.layers.end(); ++i) {
        const cost::LayerCost& layer = model.layers[static_cast<std::size_t>(i)];
        parameters += layer.parameter_bytes;
        copied += layer.copy_bytes;
        gradients += layer.gradient_bytes;
        optimizer += layer.optimizer_bytes;
        state += cost::state_bytes(layer);
      }
    }
    const Bytes activations = result.ranks[static_cast<std::size_t>(rank)].peak_activation;
    rows.push_back({fmt::format("{}", rank), fmt::format("{}", fmt::join(layers, ",")),
                    format_bytes(parameters), format_bytes(gradients), format_bytes(optimizer),
                    format_bytes(activations), format_bytes(state + activations)});
    if (copies) rows.back().insert(rows.back().begin() + 3, format_bytes(copied));
  }
  using observe::Column;
  std::vector<Column> columns = {{"rank"},       {"layers", Column::Align::kLeft},
                                 {"parameters"}, {"gradients"},
                                 {"optimizer"},  {"activations"},
                                 {"together"}};
  if (copies) columns.insert(columns.begin() + 3, Column{"copies"});
  return observe::table(columns, rows);
}

// Returns a line on the predicted time for messages, and on the bytes between hosts.
std::string messages_text(const plan::Plan& plan, const cost::ModelCost& model,
                          const DryRun& dry_run) {
  const cost::Cluster& cluster = dry_run.cluster;
  const int host = cluster.ranks.front().node;
  if (std::ranges::count(cluster.ranks, host, &cost::ClusterRank::node) == cluster.size()) {
    return cluster.inside_node == cost::Link() ? "no time for messages" : "all on one host";
  }
  const int micro_batches = static_cast<int>(dry_run.config().batch.micro_batches);
  const MessageCount crossing =
      plan::between_nodes(plan::traffic_of(plan, model, micro_batches), cluster);
  return fmt::format("with {} in {} between hosts", format_bytes(crossing.bytes),
                     observe::format_count(crossing.messages, "message"));
}

// Returns each rank's share of its device. All hosts count as this one, with equal numbers of
// devices. Replicas share the host if there is only one.
Expected<std::vector<Bytes>> device_shares(const TrainOptions& options,
                                           const cost::Cluster& cluster) {
  std::vector<Bytes> shares(cluster.ranks.size(), planned_memory(options.rank_device));
  if (options.rank_device.memory == cost::kUnlimitedMemory) return shares;
  DYNMO_ASSIGN(const int devices, c10d::device_kind(options.config.run.device).load());
  for (std::size_t r = 0; r < shares.size(); ++r) {
    auto beside =
        std::ranges::count(cluster.ranks, cluster.ranks[r].node, &cost::ClusterRank::node);
    if (beside == cluster.size()) beside *= options.config.pipeline.replicas;
    shares[r].value /= (beside + devices - 1) / devices;
  }
  return shares;
}

Expected<std::string> describe(const DryRun& dry_run) {
  const Bytes process = process::resident_memory();  // before anything is measured
  DYNMO_ASSIGN(const Costs costs, costs_of(dry_run));
  const config::Config& config = dry_run.config();
  DYNMO_ASSIGN(const Planned planned, plan_run(config, costs.model, dry_run.cluster));
  const auto& [plan, evaluation, recomputed] = planned;
  std::string text = fmt::format(
      "plan     {} on {}{}, {}: {}\n", observe::format_count(std::ssize(dry_run.layers()), "layer"),
      observe::format_count(dry_run.cluster.size(), "rank"),
      config.pipeline.replicas > 1
          ? fmt::format(" of each of {} replicas", config.pipeline.replicas)
          : "",
      schedule::name(plan.schedule), plan::to_string(plan));
  text += cut_line(plan, dry_run.layers()) + '\n';
  if (recomputed > 0) text += fmt::format("         {} layers computed again\n", recomputed);
  text += fmt::format("costs    {}\n", costs.source);
  text += fmt::format(
      "step     {} predicted ({:.3f} x ideal), bubble {:.0f} %, imbalance {:.2f}; {}\n",
      format_seconds(evaluation.step_time_s), evaluation.step_time_s / evaluation.ideal_step_time_s,
      100 * evaluation.result.bubble, evaluation.imbalance,
      messages_text(plan, costs.model, dry_run));
  text += fmt::format("memory   of each rank at its peak, besides {} of the process itself:\n",
                      format_bytes(process));
  return text + memory_table(plan, costs.model, evaluation.result);
}

}  // namespace

Expected<std::string> dry_run(const ValidOptions& valid, const cost::Cluster& cluster) {
  const TrainOptions& options = valid.options();
  if (options.resume) {
    return make_error(ErrorCode::kBadInput,
                      "{} with a dry run: wanted one of them; a dry run starts at step 0",
                      options.names.resume);
  }
  cost::Cluster ranks = cluster;
  DYNMO_ASSIGN(const std::vector<Bytes> shares, device_shares(options, cluster));
  for (std::size_t r = 0; r < shares.size(); ++r) {
    const Bytes limit = rank_memory(options.config);
    ranks.ranks[r].memory =
        std::min(ranks.ranks[r].memory, limit == cost::kUnlimitedMemory ? shares[r] : limit);
  }
  DYNMO_ASSIGN(const ResolvedRun run, resolve_for(valid, ranks.size()));
  return describe({.run = run,
                   .pipeline = pipeline_options(run, 0, runtime::Balancing::kNever),
                   .cluster = std::move(ranks)});
}

}  // namespace dynmo::train
