// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/report.h"

#include <fmt/format.h>

#include <algorithm>

#include "dynmo/core/units.h"
#include "dynmo/observe/plan_report.h"
#include "dynmo/observe/table.h"

namespace dynmo::scenario {
namespace {

using Row = std::vector<std::string>;

std::string percent(double share) { return fmt::format("{:.2f} %", 100 * share); }

// Returns text such as "12.3 k" or "4.56 M".
std::string short_number(double value) {
  if (value >= 1e6) return fmt::format("{:.2f} M", value * 1e-6);
  if (value >= 1e4) return fmt::format("{:.1f} k", value * 1e-3);
  return fmt::format("{:.1f}", value);
}

double share(double part, const RunResult& run) {
  const double total = run.time.total_s();
  return total > 0 ? part / total : 0;
}

Row row_of(const RunResult& run, const Comparison& comparison) {
  const double rate = run.tokens > 0 ? run.tokens_per_s() : run.micro_batches_per_s();
  return {run.name,
          short_number(rate),
          fmt::format("{:.3f}", comparison.speedup(run)),
          fmt::format("{:.3f}", comparison.dense_speedup(run)),
          format_seconds(run.step_time_s),
          fmt::format("{:.1f} %", 100 * run.bubble),
          fmt::format("{:.1f} %", 100 * run.imbalance),
          fmt::format("{:.2f}", run.average_ranks),
          fmt::format("{:.2f}", run.gpu_hours_saved),
          percent(share(run.time.profile_s, run)),
          percent(share(run.time.plan_s, run)),
          percent(share(run.time.move_s, run)),
          percent(share(run.time.lost_s + run.time.restart_s, run)),
          fmt::format("{}", run.migrations),
          fmt::format("{}", run.layers_moved),
          format_bytes(Bytes{static_cast<std::int64_t>(std::min(run.bytes_moved, 9e18))})};
}

// Returns every run once: dense, uniform, and the others in the requested order.
std::vector<const RunResult*> runs_of(const Comparison& comparison) {
  std::vector<const RunResult*> runs = {&comparison.dense, &comparison.uniform};
  for (const RunResult& run : comparison.runs) {
    if (run.name != comparison.uniform.name) runs.push_back(&run);
  }
  return runs;
}

std::string job_line(const Scenario& s) {
  std::string model = fmt::format("{} of {} blocks, hidden {}", s.model.family,
                                  s.model.shape.blocks, s.model.shape.hidden);
  if (!s.dynamism.trace.empty()) model = "layers as recorded";
  if (!s.model.config.empty()) model = s.model.config;
  if (!s.model.profile.empty()) model = s.model.profile;
  const std::string load = s.dynamism.trace.empty() ? s.dynamism.source : s.dynamism.trace;
  return fmt::format("{} | {} | {} x {} ranks ({}) | {} steps of {} micro-batches, {}\n", model,
                     load, s.cluster.data_parallel, s.cluster.pipeline_ranks, s.device,
                     s.training.steps, s.training.micro_batches, s.training.schedule);
}

// Returns the tokens of a step of one replica, or 0 if they are not known.
double step_tokens(const Scenario& scenario, const RunResult& run) {
  return run.micro_batches > 0 ? run.tokens / run.micro_batches * scenario.training.micro_batches
                               : 0;
}

std::string advice_lines(const Scenario& scenario, const Comparison& comparison) {
  if (!comparison.advice) return {};
  using Key = plan::AdviceKey;
  observe::AdviceWords words{.keys = {{Key::kHeadSlices, "model.head_slices ="},
                                      {Key::kSchedule, "training.schedule ="},
                                      {Key::kMicroBatches, "training.micro_batches ="},
                                      {Key::kMemory, "cluster.memory ="},
                                      {Key::kRanks, "cluster.pipeline_ranks ="},
                                      {Key::kMicroBatchSize, "model.micro_batch_size ="},
                                      {Key::kInsideLatency, "cluster.inside_latency ="},
                                      {Key::kInsideBandwidth, "cluster.inside_bandwidth ="},
                                      {Key::kBetweenLatency, "cluster.between_latency ="},
                                      {Key::kBetweenBandwidth, "cluster.between_bandwidth ="},
                                      {Key::kNicBandwidth, "cluster.nic_bandwidth ="},
                                      {Key::kSpeed, "cluster.slow_speed ="}}};
  if (scenario.device != "cpu" && scenario.model.profile.empty()) words.hour = "GPU-hour";
  return observe::advice_text(*comparison.advice, step_tokens(scenario, comparison.uniform), words);
}

Json run_json(const RunResult& run, const Comparison& comparison) {
  Json json;
  json["name"] = run.name;
  json["tokens_per_s"] = run.tokens_per_s();
  json["micro_batches_per_s"] = run.micro_batches_per_s();
  json["step_time_s"] = run.step_time_s;
  json["ideal_step_time_s"] = run.ideal_step_time_s;
  json["end"] = {{"step_time_s", run.end.step_time_s},
                 {"ideal_step_time_s", run.end.ideal_step_time_s}};
  json["bubble"] = run.bubble;
  json["imbalance"] = run.imbalance;
  json["ranks"] = run.average_ranks;
  json["gpu_hours_saved"] = run.gpu_hours_saved;
  json["speedup"] = comparison.speedup(run);
  json["dense_speedup"] = comparison.dense_speedup(run);
  json["overhead"] = {{"profile", share(run.time.profile_s, run)},
                      {"plan", share(run.time.plan_s, run)},
                      {"migrate", share(run.time.move_s, run)},
                      {"restart", share(run.time.restart_s, run)},
                      {"lost", share(run.time.lost_s, run)}};
  json["time_s"] = {{"total", run.time.total_s()},   {"train", run.time.train_s},
                    {"profile", run.time.profile_s}, {"plan", run.time.plan_s},
                    {"migrate", run.time.move_s},    {"restart", run.time.restart_s},
                    {"lost", run.time.lost_s}};
  json["plans"] = run.plans;
  json["migrations"] = run.migrations;
  json["layers_moved"] = run.layers_moved;
  json["bytes_moved"] = run.bytes_moved;
  json["steps_lost"] = run.steps_lost;
  json["steps_over_memory"] = run.steps_over_memory;
  if (const auto shares = shares_of(run)) {
    json["shares"] = {{"cuts", shares->cuts}, {"whole", shares->whole}, {"past", shares->past}};
  }
  json["decisions"] = Json::array();
  for (const DecisionAt& at : run.decisions) {
    json["decisions"].push_back({{"step", at.step},
                                 {"moved", at.decision.migrate},
                                 {"why", at.decision.why},
                                 {"reason", at.decision.reason}});
  }
  return json;
}

}  // namespace

std::string report(const Scenario& scenario, const Comparison& comparison) {
  using Align = observe::Column::Align;
  const bool tokens = comparison.uniform.tokens > 0;
  const std::vector<observe::Column> columns = {{.title = "policy", .align = Align::kLeft},
                                                {.title = tokens ? "tokens/s" : "micro-batches/s"},
                                                {.title = "x uniform"},
                                                {.title = "x dense"},
                                                {.title = "step"},
                                                {.title = "bubble"},
                                                {.title = "imbalance"},
                                                {.title = "ranks"},
                                                {.title = "GPU-h saved"},
                                                {.title = "profile"},
                                                {.title = "plan"},
                                                {.title = "move"},
                                                {.title = "lost"},
                                                {.title = "moves"},
                                                {.title = "layers"},
                                                {.title = "bytes"}};
  std::vector<Row> rows;
  std::string notes;
  for (const RunResult* run : runs_of(comparison)) {
    rows.push_back(row_of(*run, comparison));
    if (const auto shares = shares_of(*run)) {
      notes += fmt::format(
          "{}: of what re-planning can gain its steps took {:.3f}, with all overheads {:.3f}; of "
          "what the step before can tell {:.3f}\n",
          run->name, shares->cuts, shares->whole, shares->past);
    }
    if (run->steps_over_memory == 0) continue;
    notes += fmt::format("{}: in {} steps a rank needs more memory than it has\n", run->name,
                         run->steps_over_memory);
  }
  return job_line(scenario) + observe::table(columns, rows, 0) + notes +
         advice_lines(scenario, comparison);
}

std::string decisions_text(const Comparison& comparison) {
  std::string text;
  for (const RunResult& run : comparison.runs) {
    for (const DecisionAt& at : run.decisions) {
      text += fmt::format("step {:5}  {}: {}: {}\n", at.step, run.name, at.decision.why,
                          at.decision.reason);
    }
  }
  return text;
}

Json comparison_json(const Scenario& scenario, const Comparison& comparison) {
  Json json;
  json["format"] = "dynmo-simulation-1";
  json["steps"] = scenario.training.steps;
  json["micro_batches"] = scenario.training.micro_batches;
  json["pipeline_ranks"] = scenario.cluster.pipeline_ranks;
  json["data_parallel"] = scenario.cluster.data_parallel;
  json["runs"] = Json::array();
  for (const RunResult* run : runs_of(comparison)) {
    json["runs"].push_back(run_json(*run, comparison));
  }
  if (comparison.advice) {
    json["advice"] =
        plan::advice_json(*comparison.advice, step_tokens(scenario, comparison.uniform));
  }
  return json;
}

std::vector<observe::TraceProcess> trace_of(const Comparison& comparison) {
  std::vector<observe::TraceProcess> processes;
  for (const RunResult* run : runs_of(comparison)) {
    processes.push_back({.name = run->name, .steps = run->trace});
  }
  return processes;
}

}  // namespace dynmo::scenario
