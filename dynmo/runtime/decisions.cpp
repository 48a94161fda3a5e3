// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/decisions.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "dynmo/core/seconds_since.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/pack.h"

namespace dynmo::runtime {

Decisions::Decisions(cost::ModelCost known, int ranks, const PipelineOptions& options,
                     std::int64_t first_step)
    : options_(options),
      ranks_(ranks),
      controller_(std::move(known),
                  {.policy = options.policy,
                   .window = options.profile_window,
                   .micro_batches = options.micro_batches,
                   .accumulation = options.accumulation,
                   .steps = options.steps},
                  first_step) {}

void Decisions::observe(const Exchange& step, const plan::Plan& plan, int frozen_layers) {
  observed_.layers = step.layers;
  observed_.beside = step.beside;
  observed_.charges.plan_s = step.plan_s;
  if (step.migrate_s > 0) {
    observed_.charges.bytes_per_s = static_cast<double>(moved_.value) / step.migrate_s;
  }
  controller_.observe(observed_, plan, frozen_layers);
}

void Decisions::announce(cost::Announced what, std::int64_t step) {
  announced_ = what;
  controller_.announce(what, step);
}

cost::Cluster Decisions::cluster() const {
  return control::as_measured(cost::equal_ranks(ranks_, options_.memory), profiler().beside(),
                              options_.replicas, options_.accumulation);
}

bool Decisions::knows_reduction() const {
  return options_.replicas > 1 && profiler().beside().reduction_bytes_per_s.has_value();
}

Expected<std::optional<control::Decision>> Decisions::decide(const Now& now) {
  const auto start = std::chrono::steady_clock::now();
  const cost::ModelCost known = profiler().known(now.frozen_layers);
  DYNMO_ASSIGN(auto decision, controller_.decide({.plan = now.plan,
                                                  .step = now.step,
                                                  .known = known,
                                                  .cluster = cluster(),
                                                  .recomputed = now.recomputed}));
  if (decision) own_plan_s_ = seconds_since(start);
  return decision;
}

Expected<plan::LayerSet> Decisions::recomputed_under(const plan::Plan& plan,
                                                     int frozen_layers) const {
  auto known = costs(frozen_layers);
  if (!known && options_.recompute != plan::Recompute::kWhole) return plan::LayerSet();
  if (!known) known = profiler().known(frozen_layers);
  return plan::recomputed_layers(options_.recompute, plan, *known, cluster(),
                                 options_.micro_batches);
}

Expected<Decisions::Prospect> Decisions::prospect_on(const std::vector<Rank>& kept,
                                                     const Now& now) const {
  const auto costs = controller_.costs(profiler().known(now.frozen_layers), now.recomputed);
  if (!costs) {
    return make_error(ErrorCode::kBadInput, "nothing was measured yet: wanted a step or two first");
  }
  const cost::Cluster ranks = cluster();
  plan::BalanceProblem problem{.model = *costs,
                               .cluster = ranks,
                               .micro_batches = options_.micro_batches,
                               .schedule = now.plan.schedule,
                               .current = &now.plan};
  const std::size_t used = plan::ranks_at_work(now.plan).size();
  problem.stages_per_rank = std::max(1, static_cast<int>(now.plan.stages.size() / used));
  const plan::Balancer balancer = options_.policy.balancer;
  auto found = plan::propose_on(kept, balancer, problem, options_.policy.propose);
  if (!found && found.error().code == ErrorCode::kBadInput) {
    problem.schedule = schedule::ScheduleKind::k1F1B;
    found = plan::propose_on(kept, balancer, problem, options_.policy.propose);
  }
  if (!found) return found.error();
  DYNMO_ASSIGN(const plan::Evaluation current,
               plan::evaluate(now.plan, *costs, ranks, options_.micro_batches));
  return Prospect{.plan = std::move(found->plan),
                  .now_s = options_.accumulation * current.step_time_s,
                  .then_s = options_.accumulation * found->evaluation.step_time_s};
}

double Decisions::predicted_step_s(const Now& now) const {
  const auto costs = controller_.costs(profiler().known(now.frozen_layers), now.recomputed);
  if (!costs) return 0;
  const auto evaluation = plan::evaluate(now.plan, *costs, cluster(), options_.micro_batches);
  if (!evaluation) return 0;
  return options_.accumulation * evaluation->step_time_s +
         profiler().beside().overhead_s.value_or(0);
}

}  // namespace dynmo::runtime
