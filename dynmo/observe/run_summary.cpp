// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/run_summary.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "dynmo/core/median.h"

namespace dynmo::observe {
namespace {

// Returns the mean of the newest losses. The loss of a single step is noisy.
double last_loss(const RunHistory& run) {
  double sum = 0;
  for (const StepEntry& step : run.newest()) sum += step.loss;
  return run.newest().empty() ? 0 : sum / static_cast<double>(run.newest().size());
}

}  // namespace

PredictionError prediction_error(const RunHistory& run) {
  std::vector<double> errors;
  for (const StepEntry& step : run.sample()) {
    if (step.step < run.first_move() || step.predicted_s <= 0 || !is_measured(step)) continue;
    const double measured = step.step_s - balancing_s(step);
    errors.push_back(std::abs(step.predicted_s - measured) / measured);
  }
  PredictionError result{.steps = static_cast<int>(errors.size())};
  if (errors.empty()) return result;
  result.worst = *std::max_element(errors.begin(), errors.end());
  result.median = median(std::move(errors));
  return result;
}

std::vector<double> measured_values(const RunHistory& run, double StepFacts::*fact) {
  std::vector<double> values;
  for (const StepEntry& step : run.sample()) {
    if (is_measured(step)) values.push_back(step.*fact);
  }
  return values;
}

RunSummary summarize(const RunHistory& run, int ranks) {
  RunSummary summary;
  static_cast<StepFacts&>(summary) = run.over_steps();
  summary.name = run.run().name;
  summary.tokens_per_s = run.tokens_per_s();
  summary.end_tokens_per_s = run.newest_tokens_per_s();
  summary.step_time_s = median(measured_values(run, &StepFacts::step_s));
  summary.loss_first = run.sample().empty() ? 0 : run.sample().front().loss;
  summary.loss_last = last_loss(run);
  summary.loss_digest = run.loss_digest();
  summary.ranks = ranks * run.run().replicas;
  summary.replicas = run.run().replicas;
  summary.steps = run.count();
  summary.seconds = run.seconds();
  if (const auto& validation = run.validation()) {
    summary.validation_step = validation->step;
    summary.validation_loss = validation->loss;
    summary.generation_loss = validation->generation_loss;
  }
  summary.clock_error_s = run.clock_error_s();
  summary.sources = run.sources();
  summary.migrations = run.moves();
  const PredictionError error = prediction_error(run);
  summary.predicted_steps = error.steps;
  summary.prediction_error_median = error.median;
  summary.prediction_error_worst = error.worst;
  const RunHistory::Totals& totals = run.totals();
  summary.checkpoints_written = totals.checkpoints_written;
  summary.checkpoints_failed = totals.checkpoints_failed;
  summary.traffic_steps = run.traffic_steps();
  summary.traffic = run.traffic();
  if (run.run().elastic) {
    const double rank_s = totals.working_s + totals.idle_s;
    summary.size = SizeSummary{.changes = totals.size_changes,
                               .members = totals.members,
                               .mean_ranks = run.seconds() > 0 ? rank_s / run.seconds() : 0,
                               .working_s = totals.working_s,
                               .idle_s = totals.idle_s,
                               .changing_s = totals.changing_s,
                               .losses = static_cast<std::int64_t>(run.lost().size()),
                               .repeated_steps = totals.repeated_steps,
                               .saved_s = totals.saved_s};
  }
  return summary;
}

Summary summarize(const std::vector<const RunHistory*>& runs, int ranks) {
  Summary summary;
  for (const RunHistory* run : runs) summary.runs.push_back(summarize(*run, ranks));
  const RunSummary& end = summary.runs.back();
  if (end.seconds > 0) {
    summary.overhead = {end.profile_s / end.seconds, end.plan_s / end.seconds,
                        end.migrate_s / end.seconds};
  }
  summary.layers_moved = end.moved_layers;
  summary.predicted_step_time_s = median(measured_values(*runs.back(), &StepFacts::predicted_s));
  summary.measured_step_time_s = end.step_time_s;
  return summary;
}

}  // namespace dynmo::observe
