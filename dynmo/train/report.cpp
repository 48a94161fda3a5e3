// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "dynmo/observe/chart.h"
#include "dynmo/observe/summary.h"
#include "dynmo/runtime/profiler.h"

namespace dynmo::train {
namespace {

constexpr int kChartWidth = 72;

// Tokens a second over the last steps: what a progress line should show.
double recent_tokens_per_s(const RunSeries& run) {
  constexpr std::size_t kRecent = 10;
  const std::size_t count = std::min(kRecent, run.steps.size());
  double time = 0;
  for (std::size_t i = run.steps.size() - count; i < run.steps.size(); ++i)
    time += run.steps[i].step_s;
  return time > 0 ? static_cast<double>(run.tokens_per_step) * static_cast<double>(count) / time
                  : 0;
}

double mean_of(const RunSeries& run, double StepEntry::*field) {
  double sum = 0;
  for (const StepEntry& step : run.steps) sum += step.*field;
  return run.steps.empty() ? 0 : sum / static_cast<double>(run.steps.size());
}

std::vector<double> values_of(const RunSeries& run, double StepEntry::*field) {
  std::vector<double> values;
  for (const StepEntry& step : run.steps) values.push_back(step.*field);
  return values;
}

// Mean of the first or last few losses: one step's is noisy.
double first_loss(const RunSeries& run) { return run.steps.empty() ? 0 : run.steps.front().loss; }
double last_loss(const RunSeries& run) {
  constexpr std::size_t kLast = 10;
  const std::size_t count = std::min(kLast, run.steps.size());
  double sum = 0;
  for (std::size_t i = run.steps.size() - count; i < run.steps.size(); ++i)
    sum += run.steps[i].loss;
  return count > 0 ? sum / static_cast<double>(count) : 0;
}

double share(double part, const RunSeries& run) {
  return run.seconds() > 0 ? 100 * part / run.seconds() : 0;
}

int migrations(const RunSeries& run) {
  return static_cast<int>(std::count_if(run.steps.begin(), run.steps.end(),
                                        [](const StepEntry& s) { return s.moved; }));
}

std::vector<std::string> run_lines(const RunSeries& run) {
  std::vector<std::string> lines;
  lines.push_back(fmt::format(
      "{:<11}{:>9.0f} tokens/s   loss {:.4f} -> {:.4f}   imbalance {:.2f}   bubble {:.0f} %",
      run.name, run.tokens_per_s(), first_loss(run), last_loss(run),
      mean_of(run, &StepEntry::imbalance), 100 * mean_of(run, &StepEntry::bubble)));
  if (!run.validation.empty()) {
    lines.push_back(fmt::format("{:<11}validation loss {:.4f} after step {}", "",
                                run.validation.back().second, run.validation.back().first));
  }
  return lines;
}

std::vector<std::string> decision_lines(const RunSeries& run) {
  const double all = run.profile_s + run.plan_s + run.migrate_s;
  std::vector<std::string> lines;
  lines.push_back(fmt::format("moved      {} layers in {} migrations, {}", run.moved_layers,
                              migrations(run), format_bytes(run.moved_bytes)));
  lines.push_back(fmt::format(
      "overhead   {:.2f} % of the time: profiling {}, planning {}, moving {}", share(all, run),
      format_seconds(run.profile_s), format_seconds(run.plan_s), format_seconds(run.migrate_s)));
  if (run.replicas > 1) {
    lines.push_back(
        fmt::format("reduction  {:.2f} % of the time: summing gradients over {} replicas, "
                    "beside what the steps hid",
                    share(run.reduction_s, run), run.replicas));
  }
  return lines;
}

std::string prediction_line(const RunSeries& run) {
  const PredictionError error = prediction_error(run);
  return fmt::format(
      "predicted  step time: median error {:.1f} %, worst {:.1f} %, over {} steps {}",
      100 * error.median, 100 * error.worst, error.steps,
      migrations(run) > 0 ? "from the first move on" : "");
}

std::vector<std::string> chart_lines(const std::vector<const RunSeries*>& runs) {
  std::vector<std::string> lines;
  for (const auto& [title, field] :
       {std::pair{"imbalance (max / mean - 1 of the ranks' busy time)", &StepEntry::imbalance},
        std::pair{"bubble (idle share of the ranks)", &StepEntry::bubble}}) {
    std::vector<observe::Series> series;
    for (const RunSeries* run : runs) series.push_back({run->name, values_of(*run, field)});
    lines.emplace_back(title);
    const std::string chart = observe::chart(series, {.width = kChartWidth, .height = 4});
    for (std::size_t from = 0; from < chart.size();) {
      const std::size_t end = std::min(chart.find('\n', from), chart.size());
      lines.push_back(chart.substr(from, end - from));
      from = end + 1;
    }
  }
  return lines;
}

}  // namespace

std::string progress_line(std::int64_t step, std::int64_t steps,
                          const std::vector<const RunSeries*>& runs, const plan::Plan& plan) {
  const StepEntry& newest = runs.back()->steps.back();
  std::string line = fmt::format("step {:>5}/{}  loss {:.4f}", step + 1, steps, newest.loss);
  for (const RunSeries* run : runs) {
    line += fmt::format("  {} {:.0f} tokens/s", run->name, recent_tokens_per_s(*run));
  }
  const int replicas = runs.back()->replicas;
  line += fmt::format("  imbalance {:.2f}  bubble {:.0f} %  frozen {}  ranks {}{}  plan {}",
                      newest.imbalance, 100 * newest.bubble, newest.frozen_layers,
                      replicas > 1 ? fmt::format("{} x ", replicas) : "", plan.ranks,
                      plan::to_string(plan));
  return line;
}

observe::RunSummary summarize(const RunSeries& run, int ranks) {
  observe::RunSummary summary;
  summary.name = run.name;
  summary.tokens_per_s = run.tokens_per_s();
  std::vector<double> times = values_of(run, &StepEntry::step_s);
  summary.step_time_s = runtime::median(std::move(times));
  summary.loss_first = first_loss(run);
  summary.loss_last = last_loss(run);
  summary.loss_digest = loss_digest(run);
  summary.bubble = mean_of(run, &StepEntry::bubble);
  summary.imbalance = mean_of(run, &StepEntry::imbalance);
  summary.ranks = ranks * run.replicas;
  return summary;
}

Expected<Report> make_report(const std::vector<const RunSeries*>& runs,
                             const cost::ModelCost& known, const Config& config, int ranks) {
  Report report;
  observe::Summary summary;
  const RunSeries& last = *runs.back();
  for (const RunSeries* run : runs) {
    summary.runs.push_back(summarize(*run, ranks));
    for (std::string& line : run_lines(*run)) report.lines.push_back(std::move(line));
  }
  if (last.steps.empty()) {
    report.lines.emplace_back("nothing left to do: the run had finished");
    report.summary = observe::summary_json(summary);
    return report;
  }
  if (runs.size() == 2) {
    DYNMO_ASSIGN(const Comparison comparison,
                 compare(*runs[0], last, known, static_cast<int>(config.batch.micro_batches),
                         static_cast<int>(config.batch.accumulation), ranks));
    summary.speedup = comparison.speedup;
    summary.best_speedup = comparison.best_speedup;
    const bool same = summary.runs[0].loss_digest == summary.runs[1].loss_digest;
    report.lines.push_back(fmt::format(
        "losses     {} (digest {} and {})",
        same ? "the same numbers, bit for bit" : "NOT THE SAME NUMBERS",
        summary.runs[0].loss_digest.substr(0, 12), summary.runs[1].loss_digest.substr(0, 12)));
    std::string line = fmt::format("speed-up   {:.3f} x", comparison.speedup);
    if (std::isfinite(comparison.best_speedup)) {
      line += fmt::format(
          "; best possible {:.3f} x (simulated: the best of all cuts at every step, "
          "from measured costs); reached {:.2f} of the gain",
          comparison.best_speedup, (comparison.speedup - 1) / (comparison.best_speedup - 1));
    }
    report.lines.push_back(std::move(line));
  }
  for (std::string& line : decision_lines(last)) report.lines.push_back(std::move(line));
  report.lines.push_back(prediction_line(last));
  for (std::string& line : chart_lines(runs)) report.lines.push_back(std::move(line));
  report.lines.push_back(fmt::format(
      "left in    {0}/: summary.json, config.toml, {1}records/, {1}trace.json (ui.perfetto.dev), "
      "{1}profile.json",
      config.run.directory, runs.size() > 1 ? "NAME/" : ""));

  summary.layers_moved = last.moved_layers;
  summary.overhead = {share(last.profile_s, last) / 100, share(last.plan_s, last) / 100,
                      share(last.migrate_s, last) / 100};
  std::vector<double> predicted = values_of(last, &StepEntry::predicted_s);
  summary.predicted_step_time_s = runtime::median(std::move(predicted));
  summary.measured_step_time_s = summary.runs.back().step_time_s;
  report.summary = observe::summary_json(summary);
  return report;
}

}  // namespace dynmo::train
