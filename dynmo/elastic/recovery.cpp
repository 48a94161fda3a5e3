// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/recovery.h"

#include <algorithm>
#include <functional>
#include <set>
#include <vector>

namespace dynmo::elastic {
namespace {

using Steps = std::set<std::int64_t, std::greater<>>;

// Returns the steps of which some member has layers, or to which it has an update, newest first.
Steps candidates(std::span<const Report> reports) {
  Steps steps;
  for (const Report& report : reports) {
    for (const Holding& held : report.holdings) steps.insert(held.step);
    if (report.updated) steps.insert(report.updated->step + 1);
  }
  return steps;
}

std::optional<UpdateRecord> record_of(std::span<const Report> reports, std::int64_t step) {
  for (const Report& report : reports) {
    if (report.updated && report.updated->step == step) return report.updated;
  }
  return std::nullopt;
}

bool can_finish(const Report& report, const Holding& held, const Decision& decision) {
  return decision.finish && report.gradients_complete && held.kind == CopyKind::kLive &&
         held.step == report.step && held.step == decision.finish->step;
}

// Returns the decision to continue from memory at `step`, or nullopt if a layer is missing.
std::optional<Decision> from_memory(const Model& model, std::span<const Report> reports,
                                    std::int64_t step) {
  Decision decision{.step = step, .finish = record_of(reports, step - 1)};
  std::vector<bool> found(static_cast<std::size_t>(model.layers));
  bool used = false;
  for (const Report& report : reports) {
    for (const Holding& held : report.holdings) {
      if (held.layer.value < 0 || held.layer.value >= model.layers) continue;
      const bool unfinished = can_finish(report, held, decision);
      if (held.step != step && !unfinished) continue;
      found[held.layer.index()] = true;
      used = used || unfinished;
    }
  }
  if (std::ranges::count(found, false) > 0) return std::nullopt;
  if (!used) decision.finish.reset();
  return decision;
}

}  // namespace

Expected<Decision> recover(const Model& model, std::span<const Report> reports) {
  std::optional<std::int64_t> checkpoint;
  for (const Report& report : reports) checkpoint = std::max(checkpoint, report.checkpoint);
  for (const std::int64_t step : candidates(reports)) {
    if (checkpoint && *checkpoint > step) break;
    if (auto decision = from_memory(model, reports, step)) return *std::move(decision);
  }
  if (checkpoint) return Decision{.origin = Origin::kCheckpoint, .step = *checkpoint};
  if (model.initial_values) return Decision{.origin = Origin::kInitial};
  return make_error(ErrorCode::kNoCheckpoint,
                    "the {} members that are left lack layers of every step, and no checkpoint is "
                    "there; write checkpoints more often or use replicas",
                    reports.size());
}

}  // namespace dynmo::elastic
