// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/decisions.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/plan/evaluate.h"

namespace dynmo::control {

Decisions::Decisions(Controller controller, int ranks, DecisionsOptions options)
    : options_(std::move(options)), ranks_(ranks), controller_(std::move(controller)) {
  DYNMO_CHECK(options_.cluster.size() == 0 || options_.cluster.size() == ranks,
              "a cluster of {} ranks, got {}", ranks, options_.cluster.size());
  observed_.charges = controller_.charges();
}

void Decisions::observe(const ExchangedStep& step, const plan::Plan& plan, int frozen_layers) {
  observed_.layers = step.layers;
  observed_.overhead = step.stats.overhead;
  observed_.charges.plan_s = step.stats.plan_s;
  if (step.stats.migrate_s > 0) {
    observed_.charges.bytes_per_s = static_cast<double>(moved_.value) / step.stats.migrate_s;
  }
  controller_.observe(observed_, plan, frozen_layers);
}

void Decisions::announce(cost::Announced what, std::int64_t step) {
  announced_ = what;
  controller_.announce(what, step);
}

cost::Cluster Decisions::cluster() const {
  cost::Cluster ranks =
      options_.cluster.size() > 0 ? options_.cluster : cost::equal_ranks(ranks_, options_.memory);
  return as_measured(std::move(ranks), profiler().overhead(), options_.replicas,
                     options_.controller.accumulation);
}

bool Decisions::knows_reduction() const {
  return options_.replicas > 1 && profiler().overhead().reduction_bytes_per_s.has_value();
}

Expected<std::optional<Decision>> Decisions::decide(const Now& now) {
  const auto start = std::chrono::steady_clock::now();
  const cost::ModelCost known = profiler().known(now.frozen_layers);
  DYNMO_ASSIGN(auto decision, controller_.decide({.plan = now.plan,
                                                  .step = now.step,
                                                  .known = known,
                                                  .cluster = cluster(),
                                                  .recomputed = now.recomputed,
                                                  .names = options_.names}));
  if (decision) own_plan_s_ = seconds_since(start);
  return decision;
}

Expected<Decision> Decisions::vacate(const Now& now, const std::vector<Rank>& kept) {
  const auto start = std::chrono::steady_clock::now();
  const cost::ModelCost known = profiler().known(now.frozen_layers);
  DYNMO_ASSIGN(Decision decision, controller_.vacate({.plan = now.plan,
                                                      .step = now.step,
                                                      .known = known,
                                                      .cluster = cluster(),
                                                      .recomputed = now.recomputed,
                                                      .names = options_.names},
                                                     kept));
  own_plan_s_ = seconds_since(start);
  return decision;
}

Expected<plan::LayerSet> Decisions::recomputed_under(const plan::Plan& plan,
                                                     int frozen_layers) const {
  const plan::Recompute choice = options_.controller.policy.recompute;
  auto known = costs(frozen_layers);
  if (!known && choice != plan::Recompute::kWhole) return plan::LayerSet();
  if (!known) known = profiler().known(frozen_layers);
  return plan::recomputed_layers(
      choice, plan,
      {*known, controller_.speeds().slowed(cluster()), options_.controller.micro_batches});
}

double Decisions::predicted_step_s(const Now& now) const {
  const auto costs = controller_.costs(profiler().known(now.frozen_layers), now.recomputed);
  if (!costs) return 0;
  const auto evaluation = plan::evaluate(now.plan, {*costs, controller_.speeds().slowed(cluster()),
                                                    options_.controller.micro_batches});
  if (!evaluation) return 0;
  return options_.controller.accumulation * evaluation->step_time_s +
         profiler().overhead().overhead_s.value_or(0);
}

}  // namespace dynmo::control
