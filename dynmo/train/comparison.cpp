// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "dynmo/core/digest.h"
#include "dynmo/dynamism/freezing.h"
#include "dynmo/plan/best_cut.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"

namespace dynmo::train {
namespace {

// Costs of one step as measured in it; of a step of several rounds, one round's.
cost::ModelCost costs_of(const StepEntry& step, const cost::ModelCost& known, int rounds) {
  runtime::Profiler profiler(known, 1);
  profiler.add(step.layers, plan::owners(step.plan));
  cost::ModelCost costs = *profiler.costs(step.frozen_layers);
  for (cost::LayerCost& layer : costs.layers) layer.update_s /= rounds;
  return costs;
}

// What best_by_simulation knows all cuts of.
bool one_stage_a_rank(schedule::ScheduleKind kind) {
  return kind == schedule::ScheduleKind::kGpipe || kind == schedule::ScheduleKind::k1F1B ||
         kind == schedule::ScheduleKind::kZbH1;
}

}  // namespace

void RunSeries::add(const runtime::StepReport& report, const plan::Plan& plan) {
  const double balancing_s = report.profile_s + report.plan_s + report.migrate_s;
  steps.push_back({.loss = report.loss,
                   .step_s = report.step_s,
                   .balancing_s = balancing_s,
                   .predicted_s = report.predicted_s,
                   .imbalance = report.imbalance,
                   .bubble = report.bubble,
                   .frozen_layers = report.frozen_layers,
                   .moved = report.moved_layers > 0,
                   .layers = report.layers,
                   .plan = plan});
  profile_s += report.profile_s;
  plan_s += report.plan_s;
  migrate_s += report.migrate_s;
  reduction_s += report.reduction_s;
  moved_layers += report.moved_layers;
  moved_bytes += report.moved_bytes;
}

double RunSeries::seconds() const {
  double sum = 0;
  for (const StepEntry& step : steps) sum += step.step_s;
  return sum;
}

double RunSeries::tokens_per_s() const {
  const double time = seconds();
  return time > 0 ? static_cast<double>(tokens_per_step) * static_cast<double>(steps.size()) / time
                  : 0;
}

PredictionError prediction_error(const RunSeries& run) {
  const auto first =
      std::find_if(run.steps.begin(), run.steps.end(), [](const StepEntry& s) { return s.moved; });
  std::vector<double> errors;
  for (auto step = first == run.steps.end() ? run.steps.begin() : first; step != run.steps.end();
       ++step) {
    if (step->predicted_s <= 0) continue;
    const double measured = step->step_s - step->balancing_s;
    errors.push_back(std::abs(step->predicted_s - measured) / measured);
  }
  PredictionError result{.steps = static_cast<int>(errors.size())};
  if (errors.empty()) return result;
  result.worst = *std::max_element(errors.begin(), errors.end());
  result.median = runtime::median(std::move(errors));
  return result;
}

Expected<Comparison> compare(const RunSeries& baseline, const RunSeries& balanced,
                             const cost::ModelCost& known, int micro_batches, int accumulation,
                             int ranks) {
  Comparison comparison{.speedup = balanced.tokens_per_s() / baseline.tokens_per_s()};
  const cost::Cluster cluster = cost::equal_ranks(ranks);
  double baseline_s = 0;
  double best_s = 0;
  const std::size_t steps = std::min(baseline.steps.size(), balanced.steps.size());
  for (std::size_t i = 0; i < steps; ++i) {
    const StepEntry& step = baseline.steps[i];
    DYNMO_ASSIGN(
        const plan::Evaluation evaluation,
        plan::evaluate(step.plan, costs_of(step, known, accumulation), cluster, micro_batches));
    baseline_s += evaluation.step_time_s;
    if (!one_stage_a_rank(step.plan.schedule)) continue;
    DYNMO_ASSIGN(const plan::BestCut best,
                 plan::best_by_simulation(costs_of(balanced.steps[i], known, accumulation), cluster,
                                          micro_batches, step.plan.schedule));
    best_s += best.step_time_s;
  }
  comparison.best_speedup =
      best_s > 0 ? baseline_s / best_s : std::numeric_limits<double>::quiet_NaN();
  return comparison;
}

std::string loss_digest(const RunSeries& run) {
  Digester digester;
  for (const StepEntry& step : run.steps) digester.update(std::as_bytes(std::span(&step.loss, 1)));
  return digester.digest().hex();
}

}  // namespace dynmo::train
