// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "dynmo/core/median.h"
#include "dynmo/observe/run_report.h"
#include "dynmo/observe/summary.h"

namespace dynmo::train {
namespace {

// Tokens a second over the last steps: what a progress line should show.
double recent_tokens_per_s(const observe::RunHistory& run) {
  double time = 0;
  std::int64_t tokens = 0;
  for (const observe::StepEntry& step : run.newest()) {
    time += step.step_s;
    tokens += step.tokens;
  }
  return time > 0 ? static_cast<double>(tokens) / time : 0;
}

std::vector<double> values_of(const observe::RunHistory& run, double observe::StepEntry::*field) {
  std::vector<double> values;
  for (const observe::StepEntry& step : run.sample()) values.push_back(step.*field);
  return values;
}

// Mean of the last few losses: one step's is noisy.
double last_loss(const observe::RunHistory& run) {
  double sum = 0;
  for (const observe::StepEntry& step : run.newest()) sum += step.loss;
  return run.newest().empty() ? 0 : sum / static_cast<double>(run.newest().size());
}

}  // namespace

std::string progress_line(std::int64_t step, std::int64_t steps,
                          const std::vector<const observe::RunHistory*>& runs,
                          const plan::Plan& plan) {
  const observe::StepEntry& newest = runs.back()->newest().back();
  std::string line = fmt::format("step {:>5}/{}  loss {:.4f}", step + 1, steps, newest.loss);
  for (const observe::RunHistory* run : runs) {
    line += fmt::format("  {} {:.0f} tokens/s", run->run().name, recent_tokens_per_s(*run));
  }
  const int replicas = runs.back()->run().replicas;
  line += fmt::format("  imbalance {:.2f}  bubble {:.0f} %  frozen {}  ranks {}{}  plan {}",
                      newest.imbalance, 100 * newest.bubble, newest.frozen_layers,
                      replicas > 1 ? fmt::format("{} x ", replicas) : "", plan.ranks,
                      plan::to_string(plan));
  return line;
}

std::string usage_text(const observe::RunHistory& run, const observe::RunScale& scale, bool sparse,
                       Bytes memory) {
  std::string text = fmt::format("  memory {}", format_bytes(memory));
  double time = 0;
  for (const observe::StepEntry& step : run.newest()) time += step.step_s;
  const double step_s = time / static_cast<double>(std::max<std::size_t>(run.newest().size(), 1));
  const double flops = observe::flops_per_s(scale, step_s);
  if (flops > 0 && scale.peak_flops > 0) {
    text += fmt::format("  MFU {:.1f} %{}", 100 * flops / scale.peak_flops,
                        sparse ? " (of dense products)" : "");
  }
  return text;
}

observe::RunSummary summarize(const observe::RunHistory& run, int ranks) {
  observe::RunSummary summary;
  static_cast<observe::StepFacts&>(summary) = run.over_steps();
  summary.name = run.run().name;
  summary.tokens_per_s = run.tokens_per_s();
  summary.end_tokens_per_s = recent_tokens_per_s(run);
  std::vector<double> times = values_of(run, &observe::StepEntry::step_s);
  summary.step_time_s = median(std::move(times));
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
  const observe::RunHistory::Totals& totals = run.totals();
  summary.checkpoints_written = totals.checkpoints_written;
  summary.checkpoints_failed = totals.checkpoints_failed;
  summary.traffic_steps = run.traffic_steps();
  summary.traffic = run.traffic();
  if (run.run().elastic) {
    const double rank_s = totals.working_s + totals.idle_s;
    summary.size =
        observe::SizeSummary{.changes = totals.size_changes,
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

Expected<Report> make_report(const std::vector<const observe::RunHistory*>& runs,
                             const cost::ModelCost& known, const GivenCosts& given,
                             const config::Config& config, int ranks) {
  observe::Summary summary;
  summary.device = config.run.device;
  std::vector<observe::RunCurves> curves;
  for (const observe::RunHistory* run : runs) {
    summary.runs.push_back(summarize(*run, ranks));
    curves.push_back({.imbalance = values_of(*run, &observe::StepEntry::imbalance),
                      .bubble = values_of(*run, &observe::StepEntry::bubble)});
  }
  const observe::RunHistory& last = *runs.back();
  const observe::RunSummary& end = summary.runs.back();
  if (const auto pair = observe::compared(summary); pair && last.count() > 0) {
    DYNMO_ASSIGN(const Comparison comparison,
                 compare(*runs[pair->first], *runs[pair->second], known,
                         static_cast<int>(config.batch.micro_batches),
                         static_cast<int>(config.batch.accumulation), ranks, given));
    summary.speedup = comparison.speedup;
    summary.best_speedup = comparison.best_speedup;
    summary.best_is_bound = comparison.best_is_bound;
    summary.cuts_speedup = comparison.cuts_speedup;
    if (given) summary.best_costs = observe::CostsAre::kGiven;
  }
  if (end.seconds > 0) {
    summary.overhead = {end.profile_s / end.seconds, end.plan_s / end.seconds,
                        end.migrate_s / end.seconds};
  }
  summary.layers_moved = end.moved_layers;
  summary.predicted_step_time_s = median(values_of(last, &observe::StepEntry::predicted_s));
  summary.measured_step_time_s = end.step_time_s;
  return Report{.lines = observe::report_lines(summary, curves, config.run.directory),
                .summary = observe::summary_json(summary)};
}

}  // namespace dynmo::train
