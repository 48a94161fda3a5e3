// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/first_plan.h"

#include <fmt/ranges.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "dynmo/cost/cluster.h"
#include "dynmo/observe/plan_report.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/place.h"
#include "dynmo/plan/propose.h"
#include "dynmo/train/setup/pipeline_options.h"
#include "dynmo/transport/grid.h"

namespace dynmo::train {

schedule::ScheduleKind first_schedule(const config::Config& config) {
  if (config.pipeline.schedule == "auto") return schedule::ScheduleKind::k1F1B;
  return schedule::parse_schedule_kind(config.pipeline.schedule).value();
}

Expected<plan::Proposal> propose_first_plan(const config::Config& config,
                                            const cost::ModelCost& costs,
                                            const cost::Cluster& cluster) {
  const bool best = config.pipeline.schedule == "auto";
  plan::BalanceProblem problem{{costs, cluster, static_cast<int>(config.batch.micro_batches)},
                               first_schedule(config),
                               static_cast<int>(config.pipeline.stages_per_rank)};
  problem.recompute = plan::parse_recompute(config.pipeline.recompute).value();
  return plan::propose(
      plan::parse_balancer(config.pipeline.balancer).value(), problem,
      {.schedules = best ? plan::ScheduleChoice::kBest : plan::ScheduleChoice::kAsGiven,
       .rank_order = rank_order(config)});
}

Expected<plan::Plan> placed_by_hosts(const plan::Plan& plan, const config::Config& config,
                                     const cost::ModelCost& costs, const cost::Cluster& cluster) {
  if (plan::rank_order_in(cluster, rank_order(config)) == plan::RankOrder::kKeep) return plan;
  return plan::place(
      plan, {{costs, cluster, static_cast<int>(config.batch.micro_batches)}, plan.schedule});
}

Expected<void> check_cut(const std::vector<std::int64_t>& cut, int ranks, int layers) {
  if (ranks > layers) {
    return make_error(ErrorCode::kBadInput,
                      "{} ranks for {} layers: wanted at least one layer a rank; set "
                      "pipeline.ranks to {} or less, "
                      "or use more model.blocks",
                      ranks, layers, layers);
  }
  if (cut.empty()) return {};
  std::int64_t sum = 0;
  bool possible = std::ssize(cut) == ranks;
  for (const std::int64_t count : cut) {
    possible = possible && count >= 1 && count <= layers;
    if (possible) sum += count;
  }
  if (!possible || sum != layers) {
    return make_error(ErrorCode::kBadInput,
                      "pipeline.cut is [{}], wanted {} parts of at least one layer, {} in all",
                      fmt::join(cut, ", "), ranks, layers);
  }
  return {};
}

Expected<FirstPlan> first_plan(transport::Transport& transport, const ResolvedRun& run,
                               const std::vector<std::int64_t>& wanted,
                               const cost::Cluster& cluster) {
  const config::Config& config = run.config();
  const RunModel& made = run.model();
  const int layers = static_cast<int>(made.layers.size());
  const transport::Grid grid(transport, static_cast<int>(config.pipeline.replicas));
  DYNMO_TRY(check_cut(wanted, grid.positions(), layers));
  // Costs are measured under 1F1B. They do not depend on the schedule, which may need more stages.
  const bool given = !wanted.empty();
  std::vector<int> cut(wanted.begin(), wanted.end());
  const int micro_batches = static_cast<int>(config.batch.micro_batches);
  if (!given) {
    const cost::ModelCost even{std::vector<cost::LayerCost>(made.layers.size())};
    DYNMO_ASSIGN(cut, plan::balance(plan::Balancer::kUniform, {{even, cluster, micro_batches}}));
  }
  FirstPlan first{.plan = plan::make_plan(cut, schedule::ScheduleKind::k1F1B), .profiler = {}};
  runtime::PipelineOptions options = pipeline_options(run, 0, runtime::Balancing::kNever, cluster);
  options.channels = run.options().rank_device.in(transport).channels;
  options.make_sources = {};
  options.recompute = plan::Recompute::kNone;  // so that whole stashes are metered
  const auto seed = static_cast<std::uint64_t>(config.train.seed);
  runtime::Pipeline measuring(
      transport, made.layers, options,
      {first.plan,
       runtime::initial_states(made.layers, first.plan, grid.position(), seed, made.ties)});
  DYNMO_TRY(measuring.measure(run.training(), static_cast<int>(config.pipeline.measure_steps)));
  first.profiler = measuring.profiler();
  first.measured_under = measuring.plan();
  if (given) {
    first.plan.schedule = first_schedule(config);
    DYNMO_TRY(plan::schedule_of(first.plan, micro_batches, 0));
    DYNMO_ASSIGN(first.plan,
                 placed_by_hosts(first.plan, config, *measuring.costs(), measuring.cluster()));
    return first;
  }
  DYNMO_ASSIGN(plan::Proposal proposed,
               propose_first_plan(config, *measuring.costs(), measuring.cluster()));
  first.plan = std::move(proposed.plan);
  return first;
}

std::string cut_line(const plan::Plan& plan, const model::Model& layers) {
  std::vector<std::string> names;
  for (const auto& layer : layers) names.push_back(layer->name());
  return fmt::format("         {}", observe::cut_text(plan, std::move(names)));
}

}  // namespace dynmo::train
