// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/decisions.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "dynmo/core/seconds_since.h"
#include "dynmo/plan/evaluate.h"

namespace dynmo::runtime {
namespace {

using DecisionClock = std::chrono::steady_clock;

}  // namespace

Decisions::Decisions(cost::ModelCost known, int ranks, const PipelineOptions& options,
                     std::int64_t first_step)
    : options_(options),
      cluster_(cost::equal_ranks(ranks, options.memory)),
      profiler_(std::move(known), options.profile_window),
      last_move_(first_step) {}

void Decisions::announce_change() {
  profiler_.shorten();
  known_change_ = true;
}

void Decisions::use(const cost::ModelCost& costs, const plan::Plan& plan) {
  std::vector<cost::LayerSample> layers;
  for (const cost::LayerCost& layer : costs.layers) {
    layers.push_back({.time = {layer.forward_s, layer.backward_input_s, layer.backward_weight_s},
                      .update_s = layer.update_s,
                      .stash_bytes = layer.activation_bytes});
  }
  profiler_ = control::Profiler(profiler_.known(), options_.profile_window);
  profiler_.add(layers, plan::owners(plan));
}

void Decisions::observe(const Exchange& step, const plan::Plan& plan) {
  plan_cost_s_ = step.plan_s;
  move_cost_s_ = step.migrate_s;
  profiler_.add(step.layers, plan::owners(plan), step.beside);
}

void Decisions::take_measures() {
  const cost::StepSample& beside = profiler_.beside();
  cluster_.action_s = beside.action_s.value_or(0);
  cluster_.inside_node.latency_s = beside.message_s.value_or(0);
  if (!beside.reduction_bytes_per_s) return;
  cluster_.replicas = options_.replicas;
  // Of `accumulation` replays of the schedule one reduces.
  cluster_.between_replicas.bandwidth_bytes_per_s =
      options_.accumulation * *beside.reduction_bytes_per_s;
}

// Costs under which `accumulation` replays of the schedule take as long as a step: the update, once
// a step, is shared out over them. Plans are compared with the layers recomputed that are now; the
// one taken gets its own set.
std::optional<cost::ModelCost> Decisions::round_costs(const Now& now) const {
  auto model = costs(now.frozen_layers);
  if (!model) return model;
  for (cost::LayerCost& layer : model->layers) layer.update_s /= options_.accumulation;
  return plan::recomputed(*std::move(model), now.recomputed);
}

// A search takes about a second: only where something has changed since the last one.
bool Decisions::worth_asking(const Now& now, const cost::ModelCost& costs, double noise) const {
  if (options_.policy.balancer != plan::Balancer::kSearch || !planned_for_) return true;
  return planned_for_->frozen_layers() != costs.frozen_layers() ||
         control::costs_moved(*planned_for_, costs, now.plan, options_.micro_batches, noise,
                              options_.policy.noise_factor, profiler_.rank_noise());
}

control::PolicyInput Decisions::policy_input(const Now& now, const cost::ModelCost& costs,
                                             double noise) const {
  // A plan is expected to last as long as the one before it did.
  const auto left = static_cast<double>(options_.steps - now.step);
  const auto lasted = static_cast<double>(now.step - last_move_);
  return {.current = now.plan,
          .model = costs,
          .relative_noise = noise,
          .cluster = cluster_,
          .micro_batches = options_.micro_batches,
          .horizon_steps = options_.accumulation * std::min(left, std::max(lasted, 10.0)),
          .bytes_per_s = move_cost_s_ > 0 ? static_cast<double>(moved_.value) / move_cost_s_ : 0,
          .fixed_cost_s = plan_cost_s_,
          .change = known_change_ ? control::Change::kKnown : control::Change::kMeasured,
          .rank_noise = profiler_.rank_noise()};
}

Expected<Decisions::Verdict> Decisions::decide(const Now& now) {
  Verdict verdict;
  if (profiler_.steps() < 3) return verdict;
  auto start = DecisionClock::now();
  const cost::ModelCost costs = *round_costs(now);
  const double noise = profiler_.relative_noise();
  verdict.profile_s = seconds_since(start);
  if (!worth_asking(now, costs, noise)) return verdict;
  start = DecisionClock::now();
  const control::PolicyInput input = policy_input(now, costs, noise);
  DYNMO_ASSIGN(verdict.decision, control::decide(input, options_.policy));
  for (double* time : {&verdict.decision->current_step_s, &verdict.decision->planned_step_s,
                       &verdict.decision->noise_s}) {
    *time *= options_.accumulation;
  }
  planned_for_ = costs;
  verdict.plan_s = own_plan_s_ = seconds_since(start);
  if (!verdict.decision->migrate) known_change_ = false;
  return verdict;
}

void Decisions::moved(std::int64_t step, Bytes bytes) {
  moved_ = bytes;
  last_move_ = step;
  known_change_ = false;
}

Expected<plan::LayerSet> Decisions::recomputed_under(const plan::Plan& plan,
                                                     int frozen_layers) const {
  auto known = costs(frozen_layers);
  if (!known && options_.recompute != plan::Recompute::kWhole) return plan::LayerSet();
  if (!known) known = profiler_.known(frozen_layers);
  return plan::recomputed_layers(options_.recompute, plan, *known, cluster_,
                                 options_.micro_batches);
}

double Decisions::predicted_step_s(const Now& now) const {
  const auto model = round_costs(now);
  if (!model) return 0;
  const auto evaluation = plan::evaluate(now.plan, *model, cluster_, options_.micro_batches);
  if (!evaluation) return 0;
  return options_.accumulation * evaluation->step_time_s +
         profiler_.beside().overhead_s.value_or(0);
}

}  // namespace dynmo::runtime
