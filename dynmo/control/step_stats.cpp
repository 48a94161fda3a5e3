// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/step_stats.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "dynmo/core/check.h"

namespace dynmo::control {
namespace {

double mean_of(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

StepStats step_stats(std::span<const RankFigures> ranks) {
  StepStats stats;
  const auto least = [&](double RankFigures::*field) {
    std::optional<double> found;
    for (const RankFigures& own : ranks) {
      if (own.*field > 0) found = std::min(found.value_or(own.*field), own.*field);
    }
    return found;
  };
  // The values of other ranks include their waiting.
  stats.overhead.overhead_s = least(&RankFigures::overhead_s);
  stats.overhead.reduction_bytes_per_s = least(&RankFigures::reduction_bytes_per_s);
  double seconds = 0;
  double actions = 0;
  double messages_s = 0;
  int measured = 0;
  for (const RankFigures& own : ranks) {
    stats.plan_s = std::max(stats.plan_s, own.plan_s);
    stats.migrate_s = std::max(stats.migrate_s, own.migrate_s);
    seconds += own.action_overhead_s;
    actions += own.actions;
    messages_s += own.message_s;
    measured += own.message_s > 0 ? 1 : 0;
  }
  if (actions > 0) stats.overhead.action_s = seconds / actions;
  if (measured > 0) stats.overhead.message_s = messages_s / measured;
  return stats;
}

double imbalance(std::span<const double> busy_s, std::span<const Rank> positions,
                 const plan::Plan& plan) {
  DYNMO_CHECK(busy_s.size() == positions.size(), "a position of each of {} ranks, got {}",
              busy_s.size(), positions.size());
  std::vector<double> at_work;
  for (std::size_t i = 0; i < busy_s.size(); ++i) {
    if (!plan.stages_of(positions[i]).empty()) at_work.push_back(busy_s[i]);
  }
  if (at_work.empty()) return 0;
  const double mean = mean_of(at_work);
  return mean > 0 ? *std::max_element(at_work.begin(), at_work.end()) / mean - 1 : 0;
}

double bubble(std::span<const double> busy_s, double step_s) {
  DYNMO_CHECK(!busy_s.empty() && step_s > 0, "ranks and a time, got {} and {} s", busy_s.size(),
              step_s);
  return 1 - mean_of(busy_s) / step_s;
}

}  // namespace dynmo::control
