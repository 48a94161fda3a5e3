// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/propose.h"
#include "dynmo/scenario/grid.h"
#include "dynmo/scenario/planning_impl.h"
#include "dynmo/schedule/text.h"

namespace dynmo::scenario {
namespace {

plan::ProposeOptions propose_options(const Scenario& scenario, const Policy& policy) {
  plan::ProposeOptions options;
  if (scenario.policy.evaluations > 0) options.evaluations = scenario.policy.evaluations;
  // A search finds the schedule, too.
  if (policy.balancer == plan::Balancer::kSearch) options.schedules = plan::ScheduleChoice::kBest;
  return options;
}

}  // namespace

plan::Plan to_present(const plan::Plan& plan, const std::vector<int>& present) {
  std::vector<int> index(static_cast<std::size_t>(plan.ranks), -1);
  for (std::size_t i = 0; i < present.size(); ++i) {
    index[static_cast<std::size_t>(present[i])] = static_cast<int>(i);
  }
  plan::Plan result = plan;
  result.ranks = static_cast<int>(present.size());
  for (plan::PlanStage& stage : result.stages) {
    const int rank = index[stage.rank.index()];
    DYNMO_CHECK(rank >= 0, "stages on ranks that are there, got one on {}", stage.rank.value);
    stage.rank = Rank{rank};
  }
  result.order.clear();
  for (const int rank : present) {
    if (!plan.order.empty()) result.order.push_back(plan.order[static_cast<std::size_t>(rank)]);
  }
  return result;
}

plan::Plan to_all(const plan::Plan& plan, const std::vector<int>& present, int ranks) {
  plan::Plan result = plan;
  result.ranks = ranks;
  for (plan::PlanStage& stage : result.stages) stage.rank = Rank{present[stage.rank.index()]};
  if (plan.order.empty()) return result;
  result.order.assign(static_cast<std::size_t>(ranks), {});
  for (std::size_t i = 0; i < present.size(); ++i) {
    result.order[static_cast<std::size_t>(present[i])] = plan.order[i];
  }
  return result;
}

plan::Recompute recompute_of(const Scenario& scenario) {
  return plan::parse_recompute(scenario.training.recompute).value();
}

control::ControllerOptions controller_options(const Scenario& scenario, const Policy& policy) {
  const Scenario::Policy& p = scenario.policy;
  return {.policy = {.balancer = policy.balancer,
                     .minimum_gain = p.minimum_gain,
                     .noise_factor = p.noise_factor,
                     .rank_use = policy.rank_use,
                     .pack_slack = p.pack_slack,
                     .propose = propose_options(scenario, policy),
                     .recompute = recompute_of(scenario)},
          .window = p.window,
          .micro_batches = scenario.training.micro_batches,
          .steps = scenario.training.steps,
          .horizon_steps = p.horizon_steps,
          .release_after = p.release_after,
          .min_ranks = static_cast<int>(p.ranks_min)};
}

Expected<plan::Plan> propose(const Scenario& scenario, const Policy& policy,
                             const cost::ModelCost& model, const cost::Cluster& cluster,
                             const std::vector<int>& present, Generation generation) {
  DYNMO_ASSIGN(const schedule::ScheduleKind kind,
               schedule::parse_schedule_kind(scenario.training.schedule));
  const cost::Cluster there = subset(cluster, present);
  plan::BalanceProblem problem{{model, there, scenario.training.micro_batches}, kind};
  problem.recompute = recompute_of(scenario);
  plan::Plan plan;
  const bool baseline =
      policy.balancer == plan::Balancer::kUniform || policy.balancer == plan::Balancer::kBlocks;
  if (baseline) {  // whether it fits or not
    DYNMO_ASSIGN(const std::vector<int> counts, plan::balance(policy.balancer, problem));
    plan = plan::make_plan(counts, plan::placement(policy.balancer, problem), there.size(), kind);
  } else {
    DYNMO_ASSIGN(plan::Proposal proposal,
                 plan::propose(policy.balancer, problem, propose_options(scenario, policy)));
    plan = std::move(proposal.plan);
  }
  plan.generation = generation;
  return to_all(plan, present, cluster.size());
}

plan::Plan with_layers_of(plan::Plan plan, const cost::ModelCost& dense,
                          const cost::ModelCost& model) {
  if (model.size() == dense.size()) return plan;
  int next = 0;  // layer of the model
  for (plan::PlanStage& stage : plan.stages) {
    const int first = next;
    // The stage ends before the dense layer that follows it. The last stage takes all that is left.
    const int behind = stage.layers.end();
    while (next < model.size() &&
           (behind >= dense.size() || model.layers[static_cast<std::size_t>(next)].name !=
                                          dense.layers[static_cast<std::size_t>(behind)].name)) {
      ++next;
    }
    stage.layers = {LayerId{first}, next - first};
  }
  return plan;
}

double plan_s(const Scenario& scenario, const Policy& policy) {
  return policy.balancer == plan::Balancer::kSearch ? scenario.policy.search_s
                                                    : scenario.policy.plan_s;
}

std::vector<int> first_ranks(const Scenario& scenario) {
  std::set<int> there;
  for (int rank = 0; rank < scenario.cluster.pipeline_ranks; ++rank) there.insert(rank);
  for (const Event& event : scenario.events) {
    if (event.step > 0) break;
    for (const std::int64_t rank : event.leave) there.erase(static_cast<int>(rank));
    for (const std::int64_t rank : event.join) there.insert(static_cast<int>(rank));
  }
  return {there.begin(), there.end()};
}

const dynamism::Recording* recording_of(const dynamism::LoadModel& load, const Scenario& scenario,
                                        const Policy& policy) {
  const dynamism::Recording* recording = load.recording();
  const bool same = recording != nullptr && policy.replanning == Replanning::kAutonomous &&
                    recording->start.plan.ranks == std::ssize(first_ranks(scenario)) &&
                    recording->start.replicas == scenario.cluster.data_parallel &&
                    scenario.training.sample_every == 1 && recording->steps.begin()->first == 0;
  return same ? recording : nullptr;
}

cost::Cluster recorded_cluster(const dynamism::Recording& recording, const Scenario& scenario,
                               std::size_t ranks, const cost::StepSample& overhead) {
  const Bytes memory =
      scenario.cluster.memory > Bytes{0} ? scenario.cluster.memory : cost::kUnlimitedMemory;
  return control::as_measured(cost::equal_ranks(static_cast<int>(ranks), memory), overhead,
                              recording.start.replicas, recording.start.accumulation);
}

control::Profiler recorded_profiler(const dynamism::Recording& recording,
                                    const cost::ModelCost& known,
                                    const control::ControllerOptions& options) {
  control::Profiler profiler(known, options.window, options.policy.minimum_gain);
  const std::vector<Rank> owners = plan::owners(recording.start.measured_under);
  for (const cost::Observation& step : recording.start.measured) {
    profiler.add(step.layers, owners, step.overhead);
  }
  return profiler;
}

namespace {

// Returns the bytes of moved layers per second of waiting. Training waits only for their gradients:
// the rest travels during a step.
double moved_bytes_per_s(const cost::ModelCost& model, double bandwidth) {
  double moved = 0;
  double waited_for = 0;
  for (const cost::LayerCost& layer : model.layers) {
    if (layer.frozen) continue;
    moved += static_cast<double>(plan::moved_bytes(layer).value);
    waited_for += static_cast<double>(layer.gradient_bytes.value);
  }
  return waited_for > 0 && moved > 0 ? bandwidth * moved / waited_for : bandwidth;
}

}  // namespace

// F, I and W of a layer have the same noise in a step, because it comes from the machine.
cost::Observation measured(const Measuring& how, std::int64_t step, const cost::ModelCost& truth) {
  const Scenario& scenario = how.scenario;
  const Scenario::Policy& p = scenario.policy;
  cost::Observation seen{.layers = {},
                         .charges = {.plan_s = plan_s(scenario, how.policy),
                                     .move_fixed_s = p.move_fixed_s,
                                     .bytes_per_s = moved_bytes_per_s(truth, p.move_bandwidth)}};
  for (std::size_t i = 0; i < truth.layers.size(); ++i) {
    Rng rng(mix_key({static_cast<std::uint64_t>(scenario.training.seed), 0x70726f66,
                     static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(step)}));
    double factor = std::max(0.0, 1 + p.noise * rng.normal());
    if (!how.speeds.empty()) {
      const auto found = how.speeds.find(how.plan.owner(LayerId(static_cast<std::int32_t>(i))));
      if (found != how.speeds.end()) factor /= found->second;
    }
    const cost::LayerCost& layer = truth.layers[i];
    seen.layers.push_back(cost::sample_of(layer, factor));
    if (how.counts_work) {
      seen.layers.back().work = layer.forward_s + layer.backward_input_s + layer.backward_weight_s;
    }
  }
  return seen;
}

}  // namespace dynmo::scenario
