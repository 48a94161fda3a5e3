// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/summary.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "dynmo/observe/number_impl.h"

namespace dynmo::observe {
namespace {

constexpr std::string_view kSummaryFormat = "dynmo-summary-1";
constexpr std::string_view kOptimum = "optimum";  // what best_speedup is
constexpr std::string_view kBound = "bound";
constexpr std::string_view kMeasured = "measured";  // what it is of
constexpr std::string_view kGiven = "given";

using internal::measured;
using internal::read_measured;

Json traffic_json(const std::vector<TrafficRow>& rows) {
  Json json = Json::array();
  for (const TrafficRow& row : rows) {
    json.push_back({{"from", row.from},
                    {"to", row.to},
                    {"purpose", row.purpose},
                    {"messages", row.messages},
                    {"bytes", row.bytes.value}});
  }
  return json;
}

int rank_of(JsonObject& object, const std::string& key, int ranks) {
  const std::int64_t rank = object.integer(key);
  if (rank >= 0 && rank < ranks) return static_cast<int>(rank);
  object.fail(key, fmt::format("is {}, wanted a rank below {}", rank, ranks));
  return 0;
}

std::int64_t count(JsonObject& object, const std::string& key, std::optional<std::int64_t> absent) {
  const std::int64_t value = object.integer(key, absent);
  if (value < 0) object.fail(key, fmt::format("is {}, wanted 0 or more", value));
  return value;
}

Expected<std::vector<TrafficRow>> read_traffic(JsonObject& run, const Json& json, int ranks) {
  std::vector<TrafficRow> rows;
  if (!json.is_object() || !json.contains("traffic")) return rows;
  for (JsonObject& object : run.objects("traffic")) {
    TrafficRow row;
    row.from = rank_of(object, "from", ranks);
    row.to = rank_of(object, "to", ranks);
    row.purpose = object.string("purpose");
    row.messages = count(object, "messages", {});
    row.bytes = object.bytes("bytes");
    DYNMO_TRY(object.finish());
    rows.push_back(std::move(row));
  }
  return rows;
}

Json size_json(const SizeSummary& size) {
  return {{"changes", size.changes},
          {"members", size.members},
          {"mean_ranks", measured(size.mean_ranks)},
          {"working_s", measured(size.working_s)},
          {"idle_s", measured(size.idle_s)},
          {"changing_s", measured(size.changing_s)},
          {"losses", size.losses},
          {"repeated_steps", size.repeated_steps},
          {"saved_s", measured(size.saved_s)}};
}

Expected<std::optional<SizeSummary>> read_size(JsonObject& run, const Json& json) {
  auto object = run.object("size");
  if (!object) return std::optional<SizeSummary>();
  const Json& inner = json.at("size");
  SizeSummary size;
  size.changes = count(*object, "changes", {});
  size.members = rank_of(*object, "members", std::numeric_limits<int>::max());
  size.mean_ranks = read_measured(*object, inner, "mean_ranks");
  size.working_s = read_measured(*object, inner, "working_s");
  size.idle_s = read_measured(*object, inner, "idle_s");
  size.changing_s = read_measured(*object, inner, "changing_s");
  size.losses = count(*object, "losses", 0);
  size.repeated_steps = count(*object, "repeated_steps", 0);
  size.saved_s = read_measured(*object, inner, "saved_s");
  DYNMO_TRY(object->finish());
  return std::optional(size);
}

Json run_json(const RunSummary& run) {
  Json json = {{"name", run.name},
               {"tokens_per_s", measured(run.tokens_per_s)},
               {"end_tokens_per_s", measured(run.end_tokens_per_s)},
               {"step_time_s", measured(run.step_time_s)},
               {"loss_first", measured(run.loss_first)},
               {"loss_last", measured(run.loss_last)},
               {"loss_digest", run.loss_digest},
               {"ranks", run.ranks},
               {"steps", run.steps},
               {"seconds", measured(run.seconds)},
               {"validation_step", run.validation_step},
               {"validation_loss", measured(run.validation_loss)},
               {"migrations", run.migrations},
               {"replicas", run.replicas},
               {"predicted_steps", run.predicted_steps},
               {"prediction_error_median", measured(run.prediction_error_median)},
               {"prediction_error_worst", measured(run.prediction_error_worst)},
               {"checkpoints_written", run.checkpoints_written},
               {"checkpoints_failed", run.checkpoints_failed}};
  write_facts(run, FactsOf::kRun, json);
  if (run.generation_loss) json["generation_loss"] = measured(*run.generation_loss);
  if (run.size) json["size"] = size_json(*run.size);
  if (!run.sources.empty()) json["sources"] = run.sources;
  json["traffic"] = traffic_json(run.traffic);
  if (run.traffic_steps > 0) json["traffic_steps"] = run.traffic_steps;
  return json;
}

Expected<RunSummary> read_run(JsonObject& object, const Json& json) {
  RunSummary run;
  run.name = object.string("name");
  run.tokens_per_s = read_measured(object, json, "tokens_per_s");
  run.end_tokens_per_s = read_measured(object, json, "end_tokens_per_s", 0);
  run.step_time_s = read_measured(object, json, "step_time_s");
  run.loss_first = read_measured(object, json, "loss_first");
  run.loss_last = read_measured(object, json, "loss_last");
  run.loss_digest = object.string("loss_digest");
  for (const char* needed : {"bubble", "imbalance"}) {
    if (!json.contains(needed)) object.fail(needed, "is missing");
  }
  read_facts(object, json, FactsOf::kRun, run);
  const std::int64_t ranks = object.integer("ranks");
  if (ranks < 1 || ranks > std::numeric_limits<int>::max()) {
    object.fail("ranks", fmt::format("is {}, wanted a number of ranks, 1 or more", ranks));
  } else {
    run.ranks = static_cast<int>(ranks);
  }
  const auto number = [&](const char* key) { return read_measured(object, json, key, 0.0); };
  run.steps = count(object, "steps", 0);
  run.seconds = number("seconds");
  run.validation_step = count(object, "validation_step", 0);
  run.validation_loss = number("validation_loss");
  const double generation_loss = read_measured(object, json, "generation_loss", 0.0);
  if (json.contains("generation_loss")) run.generation_loss = generation_loss;
  run.migrations = count(object, "migrations", 0);
  run.replicas = count(object, "replicas", 1);
  run.predicted_steps = count(object, "predicted_steps", 0);
  run.prediction_error_median = number("prediction_error_median");
  run.prediction_error_worst = number("prediction_error_worst");
  run.checkpoints_written = count(object, "checkpoints_written", 0);
  run.checkpoints_failed = count(object, "checkpoints_failed", 0);
  DYNMO_ASSIGN(run.size, read_size(object, json));
  object.ignore("sources");
  run.sources = json.value("sources", Json::object());
  if (!run.sources.is_object()) object.fail("sources", "is not an object");
  // A run that was resumed on fewer ranks had more before.
  const int members =
      run.size ? std::max(run.ranks, run.size->members) : std::numeric_limits<int>::max();
  DYNMO_ASSIGN(run.traffic, read_traffic(object, json, members));
  run.traffic_steps = count(object, "traffic_steps", 0);
  DYNMO_TRY(object.finish());
  return run;
}

Expected<Overhead> read_overhead(JsonObject& root, const Json& json) {
  Overhead overhead;
  auto object = root.object("overhead");
  if (!object) {
    root.fail("overhead", "is missing");
    return overhead;
  }
  const Json& inner = json.at("overhead");
  overhead.profile = read_measured(*object, inner, "profile");
  overhead.plan = read_measured(*object, inner, "plan");
  overhead.migrate = read_measured(*object, inner, "migrate");
  DYNMO_TRY(object->finish());
  return overhead;
}

}  // namespace

std::optional<std::pair<std::size_t, std::size_t>> compared(const Summary& summary) {
  const std::size_t first = !summary.runs.empty() && summary.runs[0].name == "dense" ? 1 : 0;
  if (summary.runs.size() != first + 2) return std::nullopt;
  return std::pair(first, first + 1);
}

Json summary_json(const Summary& summary) {
  Json runs = Json::array();
  for (const RunSummary& run : summary.runs) runs.push_back(run_json(run));
  return {{"format", kSummaryFormat},
          {"device", summary.device},
          {"runs", std::move(runs)},
          {"speedup", measured(summary.speedup)},
          {"best_speedup", measured(summary.best_speedup)},
          {"best_speedup_is", summary.best_is_bound ? kBound : kOptimum},
          {"best_speedup_costs", summary.best_costs == CostsAre::kGiven ? kGiven : kMeasured},
          {"cuts_speedup", measured(summary.cuts_speedup)},
          {"overhead",
           {{"profile", measured(summary.overhead.profile)},
            {"plan", measured(summary.overhead.plan)},
            {"migrate", measured(summary.overhead.migrate)}}},
          {"layers_moved", summary.layers_moved},
          {"predicted_step_time_s", measured(summary.predicted_step_time_s)},
          {"measured_step_time_s", measured(summary.measured_step_time_s)}};
}

Expected<Summary> parse_summary(const Json& json, std::string_view origin) {
  JsonObject root(json, std::string(origin));
  root.expect_format(kSummaryFormat);
  Summary summary;
  summary.device = root.string("device", "cpu");
  auto runs = root.objects("runs");
  summary.speedup = read_measured(root, json, "speedup");
  summary.best_speedup = read_measured(root, json, "best_speedup");
  const std::string best_is = root.string("best_speedup_is", std::string(kOptimum));
  summary.best_is_bound = best_is == kBound;
  if (best_is != kBound && best_is != kOptimum) {
    root.fail("best_speedup_is",
              fmt::format("is '{}', wanted {} or {}", best_is, kOptimum, kBound));
  }
  const std::string costs = root.string("best_speedup_costs", std::string(kMeasured));
  if (costs == kGiven) summary.best_costs = CostsAre::kGiven;
  if (costs != kGiven && costs != kMeasured) {
    root.fail("best_speedup_costs",
              fmt::format("is '{}', wanted {} or {}", costs, kMeasured, kGiven));
  }
  summary.cuts_speedup = read_measured(root, json, "cuts_speedup", 0);
  DYNMO_ASSIGN(summary.overhead, read_overhead(root, json));
  summary.layers_moved = root.integer("layers_moved");
  summary.predicted_step_time_s = read_measured(root, json, "predicted_step_time_s");
  summary.measured_step_time_s = read_measured(root, json, "measured_step_time_s");
  DYNMO_TRY(root.finish());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    DYNMO_ASSIGN(RunSummary run, read_run(runs[i], json.at("runs").at(i)));
    summary.runs.push_back(std::move(run));
  }
  return summary;
}

Expected<Summary> read_summary(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const Json json, read_json(path));
  return parse_summary(json, path.string());
}

}  // namespace dynmo::observe
