// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/summary.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "dynmo/core/fields.h"

namespace dynmo::observe {
namespace {

constexpr std::string_view kSummaryFormat = "dynmo-summary-1";
constexpr std::string_view kOptimum = "optimum";  // kind of best_speedup
constexpr std::string_view kBound = "bound";
constexpr std::string_view kMeasured = "measured";  // source of its costs
constexpr std::string_view kGiven = "given";

constexpr Limits kMembers{
    .min = 0, .max = std::numeric_limits<int>::max() - 1, .wanted = "a rank below 2147483647"};
constexpr Limits kRanks{.min = 1, .wanted = "a number of ranks, 1 or more"};

// Returns whether a text is `second`. Returns kBadInput if it is neither of the two.
Expected<bool> is_second(std::string_view text, std::string_view first, std::string_view second) {
  if (text == first || text == second) return text == second;
  return make_error(ErrorCode::kBadInput, "is '{}', wanted {} or {}", text, first, second);
}

}  // namespace

void list_fields(IsA<SizeSummary> auto& size, auto& visit) {
  visit("changes", size.changes, kCount);
  visit("members", size.members, kMembers);
  visit.measured("mean_ranks", size.mean_ranks);
  visit.measured("working_s", size.working_s);
  visit.measured("idle_s", size.idle_s);
  visit.measured("changing_s", size.changing_s);
  visit.optional("losses", size.losses, kCount);
  visit.optional("repeated_steps", size.repeated_steps, kCount);
  visit.measured("saved_s", size.saved_s);
}

void list_fields(IsA<RunSummary> auto& run, auto& visit) {
  visit("name", run.name);
  visit.measured("tokens_per_s", run.tokens_per_s);
  visit.optional_measured("end_tokens_per_s", run.end_tokens_per_s);
  visit.measured("step_time_s", run.step_time_s);
  visit.measured("loss_first", run.loss_first);
  visit.measured("loss_last", run.loss_last);
  visit("loss_digest", run.loss_digest);
  visit("ranks", run.ranks, kRanks);
  visit.optional("steps", run.steps, kCount);
  visit.optional_measured("seconds", run.seconds);
  visit.optional("validation_step", run.validation_step, kCount);
  visit.optional_measured("validation_loss", run.validation_loss);
  visit.optional("migrations", run.migrations, kCount);
  visit.optional("replicas", run.replicas, kCount);
  visit.optional("predicted_steps", run.predicted_steps, kCount);
  visit.optional_measured("prediction_error_median", run.prediction_error_median);
  visit.optional_measured("prediction_error_worst", run.prediction_error_worst);
  visit.optional("checkpoints_written", run.checkpoints_written, kCount);
  visit.optional("checkpoints_failed", run.checkpoints_failed, kCount);
  list_facts(run, FactsOf::kRun, visit);
  visit.optional_measured("generation_loss", run.generation_loss);
  visit.optional_measured("clock_error_s", run.clock_error_s);
  visit("size", run.size);
  visit.figures("sources", run.sources);
  visit.optional("traffic", run.traffic);
  visit.left_out("traffic_steps", run.traffic_steps, 0, kCount);
}
void check_fields(const IsA<RunSummary> auto& run, JsonObject& object) {
  for (const char* needed : {"bubble", "imbalance"}) {
    if (object.value(needed) == nullptr) object.fail(needed, "is missing");
  }
  // A run that was resumed on fewer ranks had more before.
  const int members =
      run.size ? std::max(run.ranks, run.size->members) : std::numeric_limits<int>::max();
  for (std::size_t i = 0; i < run.traffic.size(); ++i) {
    const TrafficRow& row = run.traffic[i];
    for (const auto& [end, rank] : {std::pair("from", row.from), std::pair("to", row.to)}) {
      if (rank.value >= 0 && rank.value < members) continue;
      object.fail(fmt::format("traffic/{}/{}", i, end),
                  fmt::format("is {}, wanted a rank below {}", rank, members));
    }
  }
}

void list_fields(IsA<Overhead> auto& overhead, auto& visit) {
  visit.measured("profile", overhead.profile);
  visit.measured("plan", overhead.plan);
  visit.measured("migrate", overhead.migrate);
}

void list_fields(IsA<Summary> auto& summary, auto& visit) {
  visit.format(kSummaryFormat);
  visit.optional("device", summary.device);
  visit("runs", summary.runs);
  visit.measured("speedup", summary.speedup);
  visit.measured("best_speedup", summary.best_speedup);
  visit.optional_mapped(
      "best_speedup_is", summary.best_is_bound,
      [](bool bound) { return bound ? kBound : kOptimum; },
      [](std::string_view text) { return is_second(text, kOptimum, kBound); });
  visit.optional_mapped(
      "best_speedup_costs", summary.best_costs,
      [](CostsAre costs) { return costs == CostsAre::kGiven ? kGiven : kMeasured; },
      [](std::string_view text) -> Expected<CostsAre> {
        DYNMO_ASSIGN(const bool given, is_second(text, kMeasured, kGiven));
        return given ? CostsAre::kGiven : CostsAre::kMeasured;
      });
  visit.optional_measured("cuts_speedup", summary.cuts_speedup);
  visit("overhead", summary.overhead);
  visit("layers_moved", summary.layers_moved);
  visit.measured("predicted_step_time_s", summary.predicted_step_time_s);
  visit.measured("measured_step_time_s", summary.measured_step_time_s);
}

std::optional<std::pair<std::size_t, std::size_t>> compared(const Summary& summary) {
  const std::size_t first = !summary.runs.empty() && summary.runs[0].name == "dense" ? 1 : 0;
  if (summary.runs.size() != first + 2) return std::nullopt;
  return std::pair(first, first + 1);
}

Json summary_json(const Summary& summary) { return write_list(summary); }

Expected<Summary> parse_summary(const Json& json, std::string_view origin) {
  return parse_fields<Summary>(json, origin);
}

Expected<Summary> read_summary(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const Json json, read_json(path));
  return parse_summary(json, path.string());
}

}  // namespace dynmo::observe
