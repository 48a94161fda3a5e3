// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/run_data.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "dynmo/core/files.h"
#include "dynmo/cost/files.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/observe/event_log.h"
#include "dynmo/observe/load_trace_writer.h"
#include "dynmo/observe/move_picture.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/run_head.h"
#include "dynmo/observe/step_record.h"
#include "dynmo/observe/summary.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/plan.h"

namespace dynmo::observe {
namespace {

namespace fs = std::filesystem;

// Steps in columns of equal numbers of steps.
struct Columns {
  std::int64_t first = 0;
  std::int64_t steps = 1;
  std::int64_t width = 1;

  static Columns of(std::int64_t first, std::int64_t steps, std::int64_t most = kMaxColumns) {
    return {first, steps, std::max<std::int64_t>(1, (steps + most - 1) / most)};
  }
  [[nodiscard]] std::int64_t count() const { return (steps + width - 1) / width; }
  [[nodiscard]] std::int64_t column(std::int64_t step) const { return (step - first) / width; }
  [[nodiscard]] std::int64_t begin(std::int64_t column) const { return first + column * width; }
  [[nodiscard]] std::int64_t end(std::int64_t column) const {
    return std::min(begin(column + 1), first + steps);
  }
};

// Means of values by column and key; what is not finite does not count.
class Means {
 public:
  void add(std::int64_t column, const std::string& key, double value) {
    if (!std::isfinite(value)) return;
    Sum& sum = sums_[{column, key}];
    sum.total += value;
    ++sum.count;
  }
  [[nodiscard]] Json mean(std::int64_t column, const std::string& key) const {
    const auto found = sums_.find({column, key});
    if (found == sums_.end()) return nullptr;
    return found->second.total / static_cast<double>(found->second.count);
  }

 private:
  struct Sum {
    double total = 0;
    std::int64_t count = 0;
  };
  std::map<std::pair<std::int64_t, std::string>, Sum> sums_;
};

// Returns the number with four digits, which are more than a colour can show.
double rounded(double value) {
  if (value == 0 || !std::isfinite(value)) return 0;
  const double unit = std::pow(10.0, std::floor(std::log10(std::abs(value))) - 3);
  return std::round(value / unit) * unit;
}

Json at_column(const Columns& columns, std::int64_t column) {
  return {{"step", columns.begin(column)}, {"to_step", columns.end(column)}};
}

// The records of a rank by step. If a step ran twice, the last one.
using Records = std::map<std::int64_t, StepRecord>;

Expected<std::map<int, Records>> records_of(const RunFolder& folder) {
  std::map<int, Records> all;
  std::error_code fault;
  for (fs::directory_iterator next(folder.records(), fault);
       !fault && next != fs::directory_iterator(); next.increment(fault)) {
    if (next->path().extension() != ".jsonl") continue;
    DYNMO_ASSIGN(const std::vector<StepRecord> records, read_records(next->path()));
    for (const StepRecord& record : records) all[record.rank][record.step] = record;
  }
  if (all.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' has no records of steps, wanted the folder of a run",
                      folder.root().string());
  }
  return all;
}

Columns columns_of(const std::map<int, Records>& ranks) {
  std::int64_t first = ranks.begin()->second.begin()->first;
  std::int64_t last = first;
  for (const auto& [rank, records] : ranks) {
    first = std::min(first, records.begin()->first);
    last = std::max(last, records.rbegin()->first);
  }
  return Columns::of(first, last - first + 1);
}

// Returns, for each step, the record of the lowest rank that has one, for facts that are equal on
// all ranks.
std::map<std::int64_t, const StepRecord*> records_by_step(const std::map<int, Records>& ranks) {
  std::map<std::int64_t, const StepRecord*> steps;
  for (const auto& [rank, records] : ranks) {
    for (const auto& [step, record] : records) steps.try_emplace(step, &record);
  }
  return steps;
}

Json step_table(const std::map<int, Records>& ranks, const Columns& columns) {
  constexpr auto kFields = std::to_array<std::pair<const char*, double StepFacts::*>>(
      {{"loss", &StepFacts::loss},
       {"step_s", &StepFacts::step_s},
       {"predicted_s", &StepFacts::predicted_s},
       {"imbalance", &StepFacts::imbalance},
       {"bubble", &StepFacts::bubble}});
  Means means;
  for (const auto& [step, record] : records_by_step(ranks)) {
    const std::int64_t column = columns.column(step);
    for (const auto& [name, field] : kFields) means.add(column, name, record->*field);
    if (record->step_s > 0) {
      means.add(column, "tokens_per_s", static_cast<double>(record->tokens) / record->step_s);
    }
  }
  Json table = Json::array();
  for (std::int64_t column = 0; column < columns.count(); ++column) {
    Json row = at_column(columns, column);
    for (const auto& [name, field] : kFields) row[name] = means.mean(column, name);
    row["tokens_per_s"] = means.mean(column, "tokens_per_s");
    table.push_back(std::move(row));
  }
  return table;
}

Json rank_table(const std::map<int, Records>& ranks, const Columns& of_steps) {
  const std::int64_t most =
      std::clamp<std::int64_t>(kMaxRankRows / std::ssize(ranks), 1, kMaxColumns);
  const Columns columns = Columns::of(of_steps.first, of_steps.steps, most);
  Json table = Json::array();
  for (const auto& [rank, records] : ranks) {
    Means means;
    for (const auto& [step, record] : records) {
      const std::int64_t column = columns.column(step);
      if (record.step_s > 0) means.add(column, "idle", 1 - record.busy_s / record.step_s);
      means.add(column, "memory_bytes", static_cast<double>(record.memory_bytes.value));
    }
    for (std::int64_t column = 0; column < columns.count(); ++column) {
      const Json idle = means.mean(column, "idle");
      if (idle.is_null()) continue;  // it was not there
      Json row = at_column(columns, column);
      row["rank"] = rank;
      row["idle"] = idle;
      row["memory_bytes"] = means.mean(column, "memory_bytes");
      table.push_back(std::move(row));
    }
  }
  return table;
}

Json source_table(const std::map<int, Records>& ranks, const Columns& columns) {
  std::map<std::string, Means> figures;
  for (const auto& [rank, records] : ranks) {
    for (const auto& [step, record] : records) {
      for (const auto& [source, own] : record.sources.items()) {
        if (!own.is_object()) continue;
        for (const auto& [name, value] : own.items()) {
          if (!value.is_number()) continue;
          figures[fmt::format("{}.{}", source, name)].add(columns.column(step), "",
                                                          value.get<double>());
        }
      }
    }
  }
  Json table = Json::array();
  for (const auto& [name, means] : figures) {
    for (std::int64_t column = 0; column < columns.count(); ++column) {
      const Json value = means.mean(column, "");
      if (value.is_null()) continue;
      Json row = at_column(columns, column);
      row["figure"] = name;
      row["value"] = value;
      table.push_back(std::move(row));
    }
  }
  return table;
}

// Returns the share of the tokens that left at each exit, and at the head.
Json exit_table(const std::map<int, Records>& ranks, const Columns& columns) {
  Means means;
  std::map<std::string, std::size_t> order;
  for (const auto& [step, record] : records_by_step(ranks)) {
    const Json own =
        record->sources.is_object() ? record->sources.value("early_exit", Json()) : Json();
    if (!own.is_object()) continue;
    const Json left = own.value("left", Json::array());
    const Json tokens = own.value("tokens", Json());
    if (!tokens.is_number() || !(tokens.get<double>() > 0)) continue;
    for (std::size_t i = 0; i < left.size(); ++i) {
      if (!left[i].is_number()) continue;
      const std::string exit = i + 1 < left.size() ? fmt::format("exit {}", i) : "head";
      order[exit] = i;
      means.add(columns.column(step), exit, left[i].get<double>() / tokens.get<double>());
    }
  }
  Json table = Json::array();
  for (std::int64_t column = 0; column < columns.count(); ++column) {
    for (const auto& [exit, place] : order) {
      const Json share = means.mean(column, exit);
      if (share.is_null()) continue;
      Json row = at_column(columns, column);
      row["exit"] = exit;
      row["order"] = place;
      row["share"] = share;
      table.push_back(std::move(row));
    }
  }
  return table;
}

// Returns the costs that a run recorded after it began or was resumed at step `first`, or null if
// there are none.
Expected<std::unique_ptr<dynamism::LoadModel>> load_of(const RunFolder& folder,
                                                       std::int64_t first) {
  const std::map<std::int64_t, fs::path> parts = load_traces(folder);
  const auto found = parts.find(first);
  if (found == parts.end()) return std::unique_ptr<dynamism::LoadModel>();
  DYNMO_ASSIGN(const std::string text, read_file(found->second));
  // The rank that wrote it may have been lost before its first step was there.
  if (std::ranges::count(text, '\n') < 2) return std::unique_ptr<dynamism::LoadModel>();
  return dynamism::parse_trace(text, found->second.string());
}

// Adds the layers' costs from the load traces, one for each start of the run. Costs apply until the
// next recorded step.
Expected<void> add_layers(const RunFolder& folder, const Columns& columns, RunData& run) {
  std::map<std::int64_t, std::unique_ptr<dynamism::LoadModel>> loads;
  for (const auto& [first, path] : load_traces(folder)) {
    DYNMO_ASSIGN(auto load, load_of(folder, first));
    if (load != nullptr) loads.emplace(first, std::move(load));
  }
  if (loads.empty()) return {};
  for (std::int64_t column = 0; column < columns.count(); ++column) {
    auto after = loads.upper_bound(columns.begin(column));
    if (after != loads.begin()) --after;
    const cost::ModelCost costs = after->second->at(columns.begin(column));
    for (std::size_t i = 0; i < costs.layers.size(); ++i) {
      const cost::LayerCost& layer = costs.layers[i];
      if (column == 0) {
        run.layer_names.push_back(layer.name);
        run.layer_seconds.push_back(Json::array());
      }
      if (i >= run.layer_names.size()) break;  // resumed with other pieces of the head
      const double backward = layer.frozen ? 0 : layer.backward_input_s + layer.backward_weight_s;
      run.layer_seconds[i].push_back(rounded(layer.forward_s + backward));
    }
  }
  return {};
}

// Adds the cuts of a plan, in force from step `from` until `to`.
void add_cuts_of(const plan::Plan& plan, std::int64_t from, std::int64_t to, Json& table) {
  const std::vector<Rank> owners = plan::owners(plan);
  for (std::size_t i = 1; i < owners.size(); ++i) {
    if (owners[i] == owners[i - 1] || from >= to) continue;
    table.push_back({{"step", from}, {"to_step", to}, {"layer", i}});
  }
}

std::string text_of(const Json& event) {
  for (const char* key : {"reason", "why", "line", "text"}) {
    if (event.contains(key) && event[key].is_string()) return event[key].get<std::string>();
  }
  std::string text;
  for (const auto& [key, value] : event.items()) {
    if (key == "format" || key == "event" || key == "step" || key == "time_s" || key == "plan") {
      continue;
    }
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", key, value.dump());
  }
  return text;
}

void add_decisions_and_changes(const std::vector<Event>& events, RunData& run) {
  run.tables["decisions"] = run.tables["changes"] = run.tables["losses"] = Json::array();
  for (const auto& [kind, step, event, origin] : events) {
    if (kind == "decision") {
      run.tables["decisions"].push_back({{"step", step},
                                         {"taken", event.value("taken", false)},
                                         {"cause", event.value("cause", "")},
                                         {"reason", event.value("reason", "")}});
    } else if (kind == "size" || kind == "loss" || kind == "recovery" || kind == "refused") {
      std::string what = text_of(event);
      for (const char* who : {"lost", "spares"}) {
        if (event.contains(who)) what += fmt::format("; {} {}", who, event[who].dump());
      }
      run.tables["changes"].push_back({{"step", step}, {"kind", kind}, {"text", what}});
      if (kind != "loss") continue;
      const auto lost = event.find("lost");
      run.tables["losses"].push_back(
          {{"step", step},
           {"ranks", lost != event.end() && lost->is_array() ? lost->size() : 1},
           {"text", what}});
    }
  }
}

Expected<void> add_cuts(const std::vector<Event>& events, const Columns& columns, RunData& run) {
  run.tables["cuts"] = Json::array();
  const std::int64_t end = columns.first + columns.steps;
  std::optional<plan::Plan> plan;
  std::int64_t since = columns.first;
  for (const Event& event : events) {
    DYNMO_ASSIGN(std::optional<plan::Plan> now, plan_of(event));
    if (!now) continue;
    if (plan) add_cuts_of(*plan, since, std::min(event.step, end), run.tables["cuts"]);
    plan = std::move(now);
    since = std::max(event.step, columns.first);
  }
  if (plan) add_cuts_of(*plan, since, end, run.tables["cuts"]);
  return {};
}

struct DrawnMove {
  Move move;
  double gain_s = 0;         // predicted by the decision
  std::int64_t started = 0;  // step at which the run began or was last resumed
  int micro_batches = 0;
};

// Returns the move whose decision predicted the largest gain, or none if no layer moved for a gain.
Expected<std::optional<DrawnMove>> largest_move(const std::vector<Event>& events) {
  std::optional<DrawnMove> largest;
  std::optional<plan::Plan> plan;
  DrawnMove next;
  std::int64_t decided = -1;
  for (const Event& event : events) {
    if (event.kind == "start") {
      next.started = event.step;
      next.micro_batches = static_cast<int>(event.number("micro_batches"));
    } else if (event.kind == "decision" && event.json.value("taken", false)) {
      next.gain_s = event.number("gain_s");
      decided = event.step;
    }
    DYNMO_ASSIGN(std::optional<plan::Plan> now, plan_of(event));
    if (!now) continue;
    // If layers moved during a step, the new plan begins one step after the decision.
    const bool of_decision = event.step == decided || event.step == decided + 1;
    if (event.kind == "move" && decided >= 0 && of_decision && plan &&
        (!largest || next.gain_s > largest->gain_s)) {
      largest = next;
      largest->move = {.step = event.step, .before = *plan, .after = *now};
    }
    plan = std::move(now);
  }
  return largest;
}

// Adds the drawing of the largest move. Adds none if the run has not recorded its layers' costs or
// its number of micro-batches.
Expected<void> add_move(const RunFolder& folder, const std::vector<Event>& events, RunData& run) {
  DYNMO_ASSIGN(const std::optional<DrawnMove> drawn, largest_move(events));
  if (!drawn || drawn->micro_batches < 1) return {};
  DYNMO_ASSIGN(const auto load, load_of(folder, drawn->started));
  if (load == nullptr) return {};
  cost::Cluster cluster;
  std::error_code fault;
  if (fs::exists(folder.cluster(), fault)) {
    DYNMO_ASSIGN(cluster, cost::read_cluster(folder.cluster()));
  }
  auto tracks = tracks_of(drawn->move, {load->at(drawn->move.step), cluster, drawn->micro_batches});
  if (tracks) run.tracks = *std::move(tracks);
  return {};
}

// Returns the programs that began or resumed the run. Old files name none.
std::string programs_of(const std::vector<Event>& events) {
  std::vector<std::string> programs;
  for (const Event& event : events) {
    const Json program = event.kind == "start" ? event.json.value("program", Json()) : Json();
    if (!program.is_string()) continue;
    const auto name = program.get<std::string>();
    if (programs.empty() || programs.back() != name) programs.push_back(name);
  }
  return fmt::format("{}", fmt::join(programs, ", then "));
}

RunTotals totals_of(const std::map<int, Records>& ranks, const Columns& columns,
                    const std::vector<Event>& events, const RunData& run) {
  RunTotals totals{.ranks = std::ssize(ranks), .first_step = columns.first, .steps = columns.steps};
  for (const auto& [step, record] : records_by_step(ranks)) {
    if (!(record->step_s > 0)) continue;
    totals.tokens += static_cast<double>(record->tokens);
    totals.seconds += record->step_s;
  }
  totals.program = programs_of(events);
  for (const Event& event : events) {
    if (event.kind == "start" && event.step == columns.first && event.number("ranks") > 0) {
      totals.ranks = static_cast<std::int64_t>(event.number("ranks"));
    }
    if (event.kind != "move") continue;
    ++totals.moves;
    totals.moved_layers += static_cast<std::int64_t>(event.number("layers"));
  }
  totals.losses = std::ssize(run.tables["losses"]);
  for (const Json& loss : run.tables["losses"]) {
    totals.lost_ranks += loss["ranks"].get<std::int64_t>();
  }
  return totals;
}

// Reads run `number` of the summary of `root`, or the only run if there is no summary.
Expected<RunData> read_one(const RunFolder& root, const RunFolder& folder, const std::string& name,
                           const Summary& summary, std::optional<std::size_t> number) {
  RunData run{.name = name};
  DYNMO_ASSIGN(const auto ranks, records_of(folder));
  const Columns columns = columns_of(ranks);
  run.tables["steps"] = step_table(ranks, columns);
  run.tables["ranks"] = rank_table(ranks, columns);
  run.tables["sources"] = source_table(ranks, columns);
  run.tables["exits"] = exit_table(ranks, columns);
  DYNMO_TRY(add_layers(folder, columns, run));
  DYNMO_ASSIGN(const std::vector<Event> events, read_events(folder.events()));
  add_decisions_and_changes(events, run);
  DYNMO_TRY(add_cuts(events, columns, run));
  DYNMO_TRY(add_move(folder, events, run));
  run.head = run_head(root, summary, number, totals_of(ranks, columns, events, run));
  run.tables["traffic"] = Json::array();
  for (const TrafficRow& row : number ? summary.runs[*number].traffic : TrafficRows()) {
    run.tables["traffic"].push_back({{"from", row.from.value},
                                     {"to", row.to.value},
                                     {"purpose", dynmo::name(row.purpose)},
                                     {"bytes", row.count.bytes.value},
                                     {"messages", row.count.messages}});
  }
  return run;
}

}  // namespace

Expected<std::vector<RunData>> read_run_data(const fs::path& path) {
  const RunFolder folder(path);
  const std::string name = path.lexically_normal().filename().string();
  std::error_code fault;
  Summary summary;  // of a run that has not ended there is none
  if (fs::exists(folder.summary(), fault)) {
    DYNMO_ASSIGN(summary, read_summary(folder.summary()));
  }
  std::vector<RunData> runs;
  if (summary.runs.size() < 2) {
    const auto number = summary.runs.empty() ? std::nullopt : std::optional<std::size_t>(0);
    DYNMO_ASSIGN(RunData run,
                 read_one(folder, folder, name.empty() ? path.string() : name, summary, number));
    runs.push_back(std::move(run));
    return runs;
  }
  for (std::size_t i = 0; i < summary.runs.size(); ++i) {
    const std::string& one = summary.runs[i].name;
    DYNMO_ASSIGN(RunData run,
                 read_one(folder, folder.of(one), fmt::format("{}: {}", name, one), summary, i));
    runs.push_back(std::move(run));
  }
  return runs;
}

}  // namespace dynmo::observe
