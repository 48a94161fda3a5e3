// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <sstream>
#include <type_traits>
#include <utility>
#include <variant>

#include "dynmo/core/check.h"
#include "dynmo/cost/files.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/run_head.h"
#include "dynmo/observe/run_history.h"
#include "dynmo/observe/run_summary.h"
#include "dynmo/observe/table.h"

namespace dynmo::observe {
namespace {

constexpr int kChartWidth = 72;
constexpr double kLeastGain = 1.01;  // of which a share means something

using Lines = std::vector<std::string>;

std::string validation_text(const RunSummary& run) {
  if (run.validation_step == 0) return "";
  return fmt::format(
      ", validation loss {:.4f}{}", run.validation_loss,
      run.generation_loss ? fmt::format(" ({:.4f} as it generates)", *run.generation_loss) : "");
}

void add_run(Lines& lines, const RunSummary& run) {
  lines.push_back(fmt::format(
      "{:<11}{:>9.0f} tokens/s   loss {:.4f} -> {:.4f}{}   imbalance {:.2f}   bubble {:.0f} %",
      run.name, run.tokens_per_s, run.loss_first, run.loss_last, validation_text(run),
      run.imbalance, 100 * run.bubble));
}

// Returns text such as "1.609 x (2.21 x in the last ten steps)".
std::string times_as_fast(double ratio, const RunSummary& run, const RunSummary& than) {
  if (!(than.end_tokens_per_s > 0) || run.steps <= 10) return fmt::format("{:.3f} x", ratio);
  return fmt::format("{:.3f} x ({:.2f} x in the last ten steps)", ratio,
                     run.end_tokens_per_s / than.end_tokens_per_s);
}

void add_comparison(Lines& lines, const Summary& summary, const RunSummary& baseline,
                    const RunSummary& balanced) {
  const std::string& first = baseline.loss_digest;
  const std::string& second = balanced.loss_digest;
  lines.push_back(
      fmt::format("losses     {} (digest {} and {})",
                  first == second ? "the same numbers, bit for bit" : "NOT THE SAME NUMBERS",
                  first.substr(0, 12), second.substr(0, 12)));
  std::string line = "speed-up   " + times_as_fast(summary.speedup, balanced, baseline);
  const std::string_view costs =
      summary.best_costs == CostsAre::kGiven ? "given costs" : "measured costs";
  if (std::isfinite(summary.best_speedup) && summary.best_is_bound) {
    line += fmt::format(
        "; not more than {:.3f} x is possible (a bound: the slowest rank's work under the optimal "
        "cut at every step, from {}; all cuts are too many to replay)",
        summary.best_speedup, costs);
  } else if (std::isfinite(summary.best_speedup)) {
    line += fmt::format(
        "; best possible {:.3f} x (simulated: the best of all cuts at every step, from {}); ",
        summary.best_speedup, costs);
    // The two sides have the costs of two runs, so a share of a lesser gain would be of noise.
    line += summary.best_speedup > kLeastGain
                ? fmt::format("reached {:.2f} of the gain",
                              (summary.speedup - 1) / (summary.best_speedup - 1))
                : "no cut gains more than 1 %";
  }
  if (summary.cuts_speedup > 0) {
    line += fmt::format("; its cuts alone, simulated: {:.3f} x", summary.cuts_speedup);
  }
  lines.push_back(std::move(line));
}

void add_over_dense(Lines& lines, const RunSummary& dense, const RunSummary& run) {
  if (!(dense.tokens_per_s > 0)) return;
  lines.push_back("over dense " + times_as_fast(run.tokens_per_s / dense.tokens_per_s, run, dense) +
                  ": the work that is saved, and layers moved for it");
}

void add_decisions(Lines& lines, const RunSummary& run) {
  lines.push_back(fmt::format("moved      {} layers in {} migrations, {}", run.moved_layers,
                              run.migrations, format_bytes(run.moved_bytes)));
  const double all = run.profile_s + run.plan_s + run.migrate_s;
  lines.push_back(
      fmt::format("overhead   {:.2f} % of the time: profiling {}, planning {}, moving {}",
                  run.seconds > 0 ? 100 * all / run.seconds : 0, format_seconds(run.profile_s),
                  format_seconds(run.plan_s), format_seconds(run.migrate_s)));
  if (run.replicas > 1) {
    lines.push_back(
        fmt::format("reduction  {:.2f} % of the time: summing gradients over {} replicas, "
                    "beside what the steps hid",
                    run.seconds > 0 ? 100 * run.reduction_s / run.seconds : 0, run.replicas));
  }
  lines.push_back(
      fmt::format("predicted  step time: median error {:.1f} %, worst {:.1f} %, over {} steps{}",
                  100 * run.prediction_error_median, 100 * run.prediction_error_worst,
                  run.predicted_steps, run.migrations > 0 ? " from the first move on" : ""));
}

// Adds a line for each fact with a label in the list.
void add_facts_of(Lines& lines, const RunSummary& run) {
  for (const StepFact& fact : kStepFacts) {
    if (fact.report_label.empty()) continue;
    const auto is_zero = [&](auto member) { return run.*member == decltype(run.*member){}; };
    if (fact.zeros == Zeros::kLeftOut && std::visit(is_zero, fact.field)) continue;
    const auto text = [&](auto member) {
      const auto value = static_cast<const StepFacts&>(run).*member;
      using Value = std::decay_t<decltype(value)>;
      if constexpr (std::is_same_v<Value, Bytes>) return format_bytes(value);
      if constexpr (std::is_same_v<Value, int>) return fmt::format("{}", value);
      if constexpr (std::is_same_v<Value, double>) {
        if (!fact.name.ends_with("_s")) return fmt::format("{:.3g}", value);
        return fmt::format("{:.2f} % of the time", run.seconds > 0 ? 100 * value / run.seconds : 0);
      }
    };
    lines.push_back(fmt::format("{:<11}{}", fact.report_label, std::visit(text, fact.field)));
  }
}

void add_checkpoints(Lines& lines, const RunSummary& run) {
  const std::int64_t all = run.checkpoints_written + run.checkpoints_failed;
  if (all == 0) return;
  std::string line = fmt::format("saved      {} checkpoints", run.checkpoints_written);
  if (run.checkpoints_failed > 0) line += fmt::format(", {} FAILED", run.checkpoints_failed);
  lines.push_back(line + fmt::format("; training stood still {} for each",
                                     format_seconds(run.checkpoint_s / static_cast<double>(all))));
}

void add_size(Lines& lines, const RunSummary& run) {
  if (run.size && run.size->losses > 0) {
    lines.push_back(fmt::format("losses     {}, survived; {} run again",
                                format_count(run.size->losses, "rank"),
                                format_count(run.size->repeated_steps, "step")));
  }
  if (!run.size || run.size->changes == 0) return;
  const SizeSummary& size = *run.size;
  const double all = size.working_s + size.idle_s + size.changing_s;
  lines.push_back(fmt::format(
      "ranks      {:.2f} on average, {} changes; of their time {:.1f} % without layers, {:.2f} % "
      "changing; {:.4f} rank-hours saved ({:.0f} %)",
      size.mean_ranks, size.changes, all > 0 ? 100 * size.idle_s / all : 0,
      all > 0 ? 100 * size.changing_s / all : 0, size.saved_s / 3600,
      all > 0 ? 100 * size.saved_s / (all + size.saved_s) : 0));
}

// Returns a source's figure as text: a number, a text, or a list or object of them.
std::string figure_text(const Json& figure) {
  if (figure.is_number()) {
    const double number = figure.get<double>();
    return number == std::round(number) ? fmt::format("{:.0f}", number)
                                        : fmt::format("{:.4g}", number);
  }
  if (figure.is_string()) return figure.get<std::string>();
  std::string text;
  if (figure.is_object()) {
    for (const auto& [key, one] : figure.items()) {
      text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", key, figure_text(one));
    }
    return text;
  }
  if (!figure.is_array()) return figure.dump();
  for (const Json& one : figure) {
    const std::string own = figure_text(one);
    text += fmt::format("{}{}", text.empty() ? "" : " ", one.is_array() ? "[" + own + "]" : own);
  }
  return text;
}

void add_sources(Lines& lines, const RunSummary& run) {
  for (const auto& [name, figures] : run.sources.items()) {
    std::string line;
    for (const auto& [key, figure] : figures.items()) {
      line += fmt::format("{}{} {}", line.empty() ? "" : ", ", key, figure_text(figure));
    }
    lines.push_back(fmt::format("{}, last step: {}", name, line));
  }
}

// Returns the number of steps whose messages were counted.
double steps_of(const RunSummary& run) {
  const std::int64_t steps = run.traffic_steps > 0 ? run.traffic_steps : run.steps;
  return static_cast<double>(std::max<std::int64_t>(steps, 1));
}

std::string bytes_a_step(const RunSummary& run, Bytes bytes) {
  return format_bytes(Bytes{std::llround(static_cast<double>(bytes.value) / steps_of(run))});
}

void add_traffic(Lines& lines, const RunSummary& run) {
  std::string line;
  for (const Purpose purpose : kPurposes) {
    Bytes sum;
    for (const TrafficRow& row : run.traffic) {
      if (row.purpose == purpose) sum += row.count.bytes;
    }
    if (sum == Bytes{0}) continue;
    line += fmt::format("{}{} {}", line.empty() ? "" : ", ", name(purpose), bytes_a_step(run, sum));
  }
  if (!line.empty()) lines.push_back("traffic    a step: " + line);
}

// Draws only the waiting time. The imbalance of each step is in the records.
void add_chart(Lines& lines, const Summary& summary, std::span<const RunCurves> curves) {
  std::vector<Series> series;
  for (std::size_t i = 0; i < curves.size(); ++i) {
    series.push_back({"bubble of " + summary.runs[i].name, curves[i].bubble});
  }
  std::istringstream drawn(chart(series, {.width = kChartWidth, .height = 2}));
  for (std::string line; std::getline(drawn, line);) lines.push_back(std::move(line));
}

// Explains the words above to a new reader.
void add_legend(Lines& lines, const Summary& summary) {
  lines.emplace_back(
      "words      imbalance: busy time of the slowest rank / mean - 1; bubble: share of a step in "
      "which ranks wait;");
  lines.emplace_back(
      "           overhead: what balancing itself took; predicted: step time as simulated from "
      "measured layers");
  if (summary.runs.size() < 2) return;
  lines.emplace_back(
      "           digest: of the losses of all steps; static: the first plan, kept; balanced: "
      "layers move when it pays");
  if (summary.runs[0].name != "dense") return;
  lines.emplace_back("           dense: the model without what makes it dynamic");
}

}  // namespace

Lines report_lines(const Summary& summary, std::span<const RunCurves> curves,
                   const std::string& folder) {
  DYNMO_CHECK(curves.size() == summary.runs.size() && !curves.empty(), "curves of {} runs, got {}",
              summary.runs.size(), curves.size());
  Lines lines;
  if (summary.device == "emulated") {
    lines.emplace_back(
        "device     EMULATED: layers slept for given times; speeds are of no machine, losses 0");
  }
  for (const RunSummary& run : summary.runs) add_run(lines, run);
  const RunSummary& last = summary.runs.back();
  if (curves.back().bubble.empty()) {
    lines.emplace_back("nothing left to do: the run had finished");
    return lines;
  }
  if (const auto pair = compared(summary)) {
    add_comparison(lines, summary, summary.runs[pair->first], summary.runs[pair->second]);
  }
  if (summary.runs.size() > 1 && summary.runs[0].name == "dense") {
    add_over_dense(lines, summary.runs[0], last);
  }
  add_decisions(lines, last);
  add_facts_of(lines, last);
  add_size(lines, last);
  add_sources(lines, last);
  add_checkpoints(lines, last);
  add_traffic(lines, last);
  if (last.clock_error_s) {
    lines.push_back("clocks     " + clocks_text(*last.clock_error_s));
  }
  add_chart(lines, summary, curves);
  add_legend(lines, summary);
  lines.push_back(fmt::format(
      "written to {0}/: summary.json, config.toml, {1}records/, {1}trace.json (ui.perfetto.dev), "
      "{1}profile.json, {1}load-trace.jsonl",
      folder, summary.runs.size() > 1 ? "NAME/" : ""));
  return lines;
}

std::string layer_table(const cost::ModelCost& model) {
  using Align = Column::Align;
  const std::array<Column, 10> columns = {{{"layer", Align::kRight},
                                           {"name", Align::kLeft},
                                           {"F"},
                                           {"I"},
                                           {"W"},
                                           {"update"},
                                           {"state"},
                                           {"stash"},
                                           {"output"},
                                           {"", Align::kLeft}}};
  std::vector<std::vector<std::string>> rows;
  cost::LayerCost sum;
  Bytes states;
  const auto add = [&](std::string id, const cost::LayerCost& layer, Bytes state,
                       const std::string& output) {
    rows.push_back({std::move(id), layer.name, format_seconds(layer.forward_s),
                    format_seconds(layer.backward_input_s), format_seconds(layer.backward_weight_s),
                    format_seconds(layer.update_s), format_bytes(state),
                    format_bytes(layer.activation_bytes), output, layer.frozen ? "frozen" : ""});
  };
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    const cost::LayerCost& layer = model.layers[i];
    const Bytes state = cost::state_bytes(layer);
    add(fmt::format("{}", i), layer, state, format_bytes(layer.boundary_bytes));
    sum.forward_s += layer.forward_s;
    sum.backward_input_s += layer.backward_input_s;
    sum.backward_weight_s += layer.backward_weight_s;
    sum.update_s += layer.update_s;
    sum.activation_bytes += layer.activation_bytes;
    states += state;
  }
  sum.name = "all";
  add("", sum, states, "");
  return table(columns, rows);
}

std::string traffic_table(const RunSummary& run, std::size_t most) {
  struct Pair {
    std::string from;
    std::string to;
    std::map<Purpose, Bytes> bytes;
    MessageCount all;
  };
  std::map<std::pair<WorldRank, WorldRank>, Pair> by_ranks;
  for (const TrafficRow& row : run.traffic) {
    Pair& pair = by_ranks[{row.from, row.to}];
    pair.from = fmt::format("{}", row.from);
    pair.to = fmt::format("{}", row.to);
    pair.bytes[row.purpose] += row.count.bytes;
    add(pair.all, row.count);
  }
  if (by_ranks.empty()) return "";
  std::vector<Pair> pairs;
  for (auto& [ranks, pair] : by_ranks) pairs.push_back(std::move(pair));
  if (pairs.size() > most) {
    std::stable_sort(pairs.begin(), pairs.end(),
                     [](const Pair& a, const Pair& b) { return a.all.bytes > b.all.bytes; });
    Pair others{.from = "other", .to = "pairs", .bytes = {}, .all = {}};
    for (std::size_t i = most; i < pairs.size(); ++i) {
      for (const auto& [purpose, bytes] : pairs[i].bytes) others.bytes[purpose] += bytes;
      add(others.all, pairs[i].all);
    }
    pairs.resize(most);
    pairs.push_back(std::move(others));
  }
  std::vector<Column> columns = {{"from"}, {"to"}};
  for (const Purpose purpose : kPurposes) columns.push_back({std::string(name(purpose))});
  columns.push_back({"bytes a step"});
  columns.push_back({"messages a step"});
  std::vector<std::vector<std::string>> rows;
  for (Pair& pair : pairs) {
    rows.push_back({pair.from, pair.to});
    for (const Purpose purpose : kPurposes) {
      rows.back().push_back(bytes_a_step(run, pair.bytes[purpose]));
    }
    rows.back().push_back(bytes_a_step(run, pair.all.bytes));
    rows.back().push_back(
        fmt::format("{:.1f}", static_cast<double>(pair.all.messages) / steps_of(run)));
  }
  return table(columns, rows);
}

Expected<std::string> read_report(const std::filesystem::path& folder) {
  const RunFolder run_folder(folder);
  std::error_code fault;
  if (!std::filesystem::exists(run_folder.summary(), fault)) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' has no summary.json: wanted the folder of a run that has ended",
                      folder.string());
  }
  DYNMO_ASSIGN(const Summary summary, read_summary(run_folder.summary()));
  if (summary.runs.empty()) {
    return make_error(ErrorCode::kBadInput, "{}: /runs is empty, wanted a run",
                      run_folder.summary().string());
  }
  const auto home = [&](const RunSummary& run) {
    return run_folder.of(summary.runs.size() > 1 ? run.name : "");
  };
  std::vector<RunCurves> curves;
  for (const RunSummary& run : summary.runs) {
    DYNMO_ASSIGN(const RunHistory history, read_history(home(run), {.name = run.name}, run.steps));
    curves.push_back({.imbalance = measured_values(history, &StepFacts::imbalance),
                      .bubble = measured_values(history, &StepFacts::bubble)});
  }
  std::string text;
  for (const std::string& line : report_lines(summary, curves, folder.string())) {
    text += line + "\n";
  }
  const RunSummary& last = summary.runs.back();
  DYNMO_ASSIGN(const cost::ModelCost model, cost::read_profile(home(last).profile()));
  text += fmt::format(
      "layers of {}: medians over the last steps; F, I, W, stash and output of a "
      "micro-batch; state: parameters, gradients, moments\n{}",
      last.name, layer_table(model));
  if (const std::string table = traffic_table(last); !table.empty()) {
    text += fmt::format(
        "messages of {} over {} steps, everything between the first step and the "
        "last\n{}",
        last.name, steps_of(last), table);
  }
  return text;
}

}  // namespace dynmo::observe
