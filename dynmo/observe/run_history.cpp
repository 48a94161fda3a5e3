// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/run_history.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <sstream>
#include <system_error>
#include <utility>

#include "dynmo/core/files.h"
#include "dynmo/observe/event_log.h"
#include "dynmo/observe/step_record.h"
#include "dynmo/plan/pack.h"

namespace dynmo::observe {
namespace {

namespace fs = std::filesystem;

// Returns NaN for Inf, because JSON has null for both.
double finite_or_nan(double value) {
  return std::isfinite(value) ? value : std::numeric_limits<double>::quiet_NaN();
}

double number_of(const Json& json) {
  return json.is_null() ? std::numeric_limits<double>::quiet_NaN() : json.get<double>();
}

// The parts of a record that a history needs.
struct KeptStep {
  StepFacts facts;
  std::int64_t tokens = 0;
};

// Returns the files of records by the number of their rank.
std::map<int, fs::path> record_files(const RunFolder& folder) {
  constexpr std::string_view kPrefix = "rank-";
  std::map<int, fs::path> files;
  std::error_code fault;
  for (fs::directory_iterator next(folder.records(), fault);
       !fault && next != fs::directory_iterator(); next.increment(fault)) {
    const std::string name = next->path().stem().string();
    int rank = 0;
    if (next->path().extension() != ".jsonl" || !name.starts_with(kPrefix)) continue;
    const char* end = name.data() + name.size();
    if (std::from_chars(name.data() + kPrefix.size(), end, rank).ptr == end) {
      files.emplace(rank, next->path());
    }
  }
  return files;
}

struct KeptSteps {
  std::vector<std::optional<KeptStep>> steps;
  Json sources = Json::object();  // of the last step
};

Expected<KeptSteps> read_steps(const RunFolder& folder, std::int64_t steps) {
  KeptSteps all{.steps = std::vector<std::optional<KeptStep>>(static_cast<std::size_t>(steps))};
  std::int64_t missing = steps;
  for (const auto& [rank, path] : record_files(folder)) {
    if (missing == 0) break;
    DYNMO_ASSIGN(const std::string text, read_file(path));
    std::map<std::int64_t, KeptStep> own;
    const auto add = [&](StepRecord record) {
      if (record.step < 0 || record.step >= steps) return;
      if (all.steps[static_cast<std::size_t>(record.step)]) return;
      if (record.step == steps - 1) all.sources = std::move(record.sources);
      own.insert_or_assign(record.step,
                           KeptStep{static_cast<const StepFacts&>(record), record.tokens});
    };
    DYNMO_TRY(visit_records(text, path.string(), add));
    missing -= std::ssize(own);
    for (auto& [step, kept] : own) all.steps[static_cast<std::size_t>(step)] = kept;
  }
  return all;
}

// Returns the ranks of the plans in force, by the first step of each. If a run goes back, its new
// plans replace those from there on.
Expected<std::map<std::int64_t, RunHistory::Ranks>> ranks_by_step(const std::vector<Event>& events,
                                                                  int replicas) {
  std::map<std::int64_t, RunHistory::Ranks> ranks;
  for (const Event& event : events) {
    DYNMO_ASSIGN(const auto plan, plan_of(event));
    if (!plan) continue;
    ranks.erase(ranks.lower_bound(event.step), ranks.end());
    ranks.emplace(event.step, RunHistory::ranks_of(*plan, replicas));
  }
  return ranks;
}

// Adds the messages. Skips lines that cannot be read, because the rest of the history does not need
// them.
void add_traffic_of(const RunFolder& folder, RunHistory& history) {
  const auto text = read_file(folder.traffic());
  if (!text) return;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    const auto json = parse_json(line, "");
    if (!json) continue;
    if (const auto interval = parse_traffic_interval(*json, "")) history.add_traffic(*interval);
  }
}

}  // namespace

bool is_measured(const StepEntry& step) { return !std::isnan(step.step_s); }

RunHistory::Ranks RunHistory::ranks_of(const plan::Plan& plan, int replicas) {
  return {plan.ranks * replicas, static_cast<int>(plan::ranks_at_work(plan).size()) * replicas};
}

void RunHistory::add(StepEntry entry, const Ranks& ranks) {
  // Events tell of checkpoints: the pause of one may be after the last step.
  entry.checkpoint_s = 0;
  StepEntry shown = entry;
  shown.layers.clear();
  shown.plan = {};
  steps_.newest.push_back(std::move(shown));
  if (steps_.newest.size() > kMaxNewest) steps_.newest.pop_front();
  const auto loss = std::bit_cast<std::uint64_t>(finite_or_nan(entry.loss));
  steps_.losses = digest_of(fmt::format("{} {:016x}", steps_.losses.hex(), loss));
  if (steps_.count == 0) steps_.first_ranks = ranks.all;
  if (is_measured(entry)) {
    totals_.working_s += ranks.at_work * entry.step_s;
    totals_.idle_s += (ranks.all - ranks.at_work) * entry.step_s;
    totals_.saved_s += std::max(0, steps_.first_ranks - ranks.all) * entry.step_s;
    steps_.seconds += entry.step_s;
    steps_.tokens += entry.tokens;
  }
  add_facts(steps_.sums, entry, OverSteps::kSum);
  add_facts(steps_.sums, entry, OverSteps::kMax);
  if (entry.moved_layers > 0) {
    ++steps_.moves;
    if (steps_.first_move < 0) steps_.first_move = entry.step;
  }
  if (steps_.count % steps_.stride == 0) add_to_sample(std::move(entry));
  ++steps_.count;
}

void RunHistory::add_to_sample(StepEntry entry) {
  if (steps_.sample.size() == kMaxSample) {
    for (std::size_t i = 0; 2 * i < steps_.sample.size(); ++i)
      steps_.sample[i] = std::move(steps_.sample[2 * i]);
    steps_.sample.resize(kMaxSample / 2);
    steps_.stride *= 2;
  }
  // (Where the stride has just doubled, this step is still a multiple of it.)
  steps_.sample.push_back(std::move(entry));
}

void RunHistory::note_members(const Json& numbers) {
  for (const Json& number : numbers) {
    totals_.members = std::max(totals_.members, number.get<int>() + 1);
  }
}

void RunHistory::add_event(std::string_view kind, std::int64_t step, const Json& event) {
  if (!event.is_object()) return;
  if (kind == "start") {
    totals_.members = std::max(totals_.members, event.value("ranks", 0));
    clock_error_s_.reset();  // of the trace before
  } else if (kind == "clocks") {
    clock_error_s_ = event.at("error_s").get<double>();
  } else if (kind == "validation") {
    validation_ = Validation{.step = step, .loss = number_of(event.at("loss"))};
    const auto found = event.find("generation_loss");
    if (found != event.end()) validation_->generation_loss = number_of(*found);
  } else if (kind == "saved") {
    totals_.checkpoints_written += event.at("written").get<int>();
    totals_.checkpoints_failed += event.at("failed").get<int>();
    steps_.sums.checkpoint_s += event.at("pause_s").get<double>();
  } else if (kind == "move" && event.contains("cause")) {  // the records have the other moves
    ++steps_.moves;
    steps_.sums.moved_layers += event.value("layers", 0);
    steps_.sums.moved_bytes += Bytes(event.value("bytes", std::int64_t{0}));
    steps_.sums.migrate_s += event.at("seconds").get<double>();
  } else if (kind == "size") {
    ++totals_.size_changes;
    const Json& before = event.at("ranks_before");
    totals_.changing_s += static_cast<double>(before.size()) * event.at("seconds").get<double>();
    note_members(event.at("ranks"));
  } else if (kind == "loss") {
    for (const Json& number : event.at("lost")) lost_.insert(number.get<int>());
    note_members(event.at("lost"));
  } else if (kind == "recovery") {
    totals_.repeated_steps += event.at("steps_again").get<std::int64_t>();
    note_members(event.at("ranks"));
  }
}

void RunHistory::add_traffic(const TrafficInterval& interval) {
  traffic_.insert(traffic_.end(), interval.measured.begin(), interval.measured.end());
  traffic_ = sums_of(std::move(traffic_));
  traffic_steps_ += interval.steps;
}

StepFacts RunHistory::over_steps() const {
  StepFacts facts = steps_.sums;
  std::size_t measured = 0;
  for (const StepEntry& step : steps_.sample) {
    if (!is_measured(step)) continue;
    add_facts(facts, step, OverSteps::kMean);
    ++measured;
  }
  make_means(facts, measured);
  return facts;
}

double RunHistory::tokens_per_s() const {
  return steps_.seconds > 0 ? static_cast<double>(steps_.tokens) / steps_.seconds : 0;
}

double RunHistory::newest_tokens_per_s() const {
  double seconds = 0;
  std::int64_t tokens = 0;
  for (const StepEntry& step : steps_.newest) {
    if (!is_measured(step)) continue;
    seconds += step.step_s;
    tokens += step.tokens;
  }
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

Expected<RunHistory> read_history(const RunFolder& folder, RunHistory::Run run,
                                  std::int64_t steps) {
  RunHistory history(std::move(run));
  DYNMO_ASSIGN(const std::vector<Event> events, read_events(folder.events()));
  for (const Event& event : events) {
    try {
      history.add_event(event.kind, event.step, event.json);
    } catch (const Json::exception& fault) {
      return make_error(ErrorCode::kBadInput, "{}: {}", event.origin, fault.what());
    }
  }
  DYNMO_ASSIGN(const auto ranks, ranks_by_step(events, history.run().replicas));
  DYNMO_ASSIGN(KeptSteps records, read_steps(folder, steps));
  for (std::size_t i = 0; i < records.steps.size(); ++i) {
    if (!records.steps[i]) continue;
    const auto step = static_cast<std::int64_t>(i);
    const auto after = ranks.upper_bound(step);
    history.add({records.steps[i]->facts, step, records.steps[i]->tokens},
                after == ranks.begin() ? RunHistory::Ranks() : std::prev(after)->second);
  }
  history.set_sources(records.sources);
  add_traffic_of(folder, history);
  return history;
}

}  // namespace dynmo::observe
