// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/summary.h"

#include <limits>

#include "dynmo/observe/number_impl.h"

namespace dynmo::observe {
namespace {

constexpr std::string_view kFormat = "dynmo-summary-1";

using internal::measured;
using internal::read_measured;

Json run_json(const RunSummary& run) {
  return {{"name", run.name},
          {"tokens_per_s", measured(run.tokens_per_s)},
          {"step_time_s", measured(run.step_time_s)},
          {"loss_first", measured(run.loss_first)},
          {"loss_last", measured(run.loss_last)},
          {"loss_digest", run.loss_digest},
          {"bubble", measured(run.bubble)},
          {"imbalance", measured(run.imbalance)},
          {"ranks", run.ranks}};
}

RunSummary read_run(JsonObject& object, const Json& json) {
  RunSummary run;
  run.name = object.string("name");
  run.tokens_per_s = read_measured(object, json, "tokens_per_s");
  run.step_time_s = read_measured(object, json, "step_time_s");
  run.loss_first = read_measured(object, json, "loss_first");
  run.loss_last = read_measured(object, json, "loss_last");
  run.loss_digest = object.string("loss_digest");
  run.bubble = read_measured(object, json, "bubble");
  run.imbalance = read_measured(object, json, "imbalance");
  const std::int64_t ranks = object.integer("ranks");
  if (ranks < 1 || ranks > std::numeric_limits<int>::max()) {
    object.fail("ranks", fmt::format("is {}, wanted a number of ranks, 1 or more", ranks));
  } else {
    run.ranks = static_cast<int>(ranks);
  }
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

Json summary_json(const Summary& summary) {
  Json runs = Json::array();
  for (const RunSummary& run : summary.runs) runs.push_back(run_json(run));
  return {{"format", kFormat},
          {"runs", std::move(runs)},
          {"speedup", measured(summary.speedup)},
          {"best_speedup", measured(summary.best_speedup)},
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
  root.expect_format(kFormat);
  Summary summary;
  auto runs = root.objects("runs");
  summary.speedup = read_measured(root, json, "speedup");
  summary.best_speedup = read_measured(root, json, "best_speedup");
  DYNMO_ASSIGN(summary.overhead, read_overhead(root, json));
  summary.layers_moved = root.integer("layers_moved");
  summary.predicted_step_time_s = read_measured(root, json, "predicted_step_time_s");
  summary.measured_step_time_s = read_measured(root, json, "measured_step_time_s");
  DYNMO_TRY(root.finish());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    summary.runs.push_back(read_run(runs[i], json.at("runs").at(i)));
    DYNMO_TRY(runs[i].finish());
  }
  return summary;
}

Expected<Summary> read_summary(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const Json json, read_json(path));
  return parse_summary(json, path.string());
}

}  // namespace dynmo::observe
