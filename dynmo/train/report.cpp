// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "dynmo/observe/run_report.h"
#include "dynmo/observe/run_summary.h"
#include "dynmo/observe/summary.h"

namespace dynmo::train {

std::string progress_line(std::int64_t step, std::int64_t steps,
                          const std::vector<const observe::RunHistory*>& runs,
                          const plan::Plan& plan) {
  const observe::StepEntry& newest = runs.back()->newest().back();
  std::string line = fmt::format("step {:>5}/{}  loss {:.4f}", step + 1, steps, newest.loss);
  for (const observe::RunHistory* run : runs) {
    line += fmt::format("  {} {:.0f} tokens/s", run->run().name, run->newest_tokens_per_s());
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

Expected<Report> make_report(const std::vector<const observe::RunHistory*>& runs,
                             const cost::ModelCost& known, const GivenCosts& given,
                             const config::Config& config, int ranks) {
  observe::Summary summary = observe::summarize(runs, ranks);
  summary.device = config.run.device;
  std::vector<observe::RunCurves> curves;
  for (const observe::RunHistory* run : runs) {
    curves.push_back({.imbalance = observe::measured_values(*run, &observe::StepFacts::imbalance),
                      .bubble = observe::measured_values(*run, &observe::StepFacts::bubble)});
  }
  if (const auto pair = observe::compared(summary); pair && runs.back()->count() > 0) {
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
  return Report{.lines = observe::report_lines(summary, curves, config.run.directory),
                .summary = observe::summary_json(summary)};
}

}  // namespace dynmo::train
