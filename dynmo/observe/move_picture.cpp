// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/move_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/schedule/text.h"

namespace dynmo::observe {
namespace {

using schedule::TimedAction;

struct Span {
  int rank = 0;
  TimedAction timed;
};

// Returns the compute actions that are shown, in the order of their starts.
std::vector<Span> shown(const schedule::Timeline& timeline) {
  const int ranks = static_cast<int>(timeline.ranks.size());
  std::vector<Span> spans;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank >= kMaxSpanRanks / 2 && rank < ranks - kMaxSpanRanks / 2) continue;
    for (const TimedAction& timed : timeline.ranks[static_cast<std::size_t>(rank)]) {
      if (schedule::is_compute(timed.action.kind)) spans.push_back({rank, timed});
    }
  }
  std::ranges::stable_sort(spans, {}, [](const Span& span) { return span.timed.start; });
  if (spans.size() > kMaxSpans) spans.resize(kMaxSpans);
  return spans;
}

Expected<void> add_replayed(const plan::Plan& plan, const std::string& name,
                            const plan::Costs& costs, Json& tracks) {
  // A run's folder has the cluster of its last group alone.
  const cost::Cluster cluster =
      costs.cluster.size() == plan.ranks ? costs.cluster : cost::equal_ranks(plan.ranks);
  DYNMO_ASSIGN(
      const plan::Evaluation evaluation,
      plan::evaluate(plan, {costs.model, cluster, costs.micro_batches}, {.timeline = true}));
  const std::string text =
      fmt::format("{}: {} a step", name, format_seconds(evaluation.step_time_s));
  std::map<int, Json> of_ranks;
  for (const auto& [rank, timed] : shown(evaluation.result.timeline)) {
    Json& track = of_ranks[rank];
    track["actions"].push_back(schedule::to_string(timed.action));
    track["start_s"].push_back(to_seconds(timed.start));
    track["end_s"].push_back(to_seconds(timed.end));
  }
  for (auto& [rank, track] : of_ranks) {
    track["plan"] = text;
    track["rank"] = rank;
    tracks.push_back(std::move(track));
  }
  return {};
}

}  // namespace

Expected<Json> tracks_of(const Move& move, const plan::Costs& costs) {
  Json tracks = Json::array();
  DYNMO_TRY(add_replayed(move.before, fmt::format("before step {}", move.step), costs, tracks));
  DYNMO_TRY(add_replayed(move.after, fmt::format("from step {} on", move.step), costs, tracks));
  return tracks;
}

}  // namespace dynmo::observe
