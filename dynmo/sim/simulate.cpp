// SPDX-License-Identifier: Apache-2.0
#include "dynmo/sim/simulate.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/schedule/check.h"
#include "dynmo/sim/replay_impl.h"
#include "dynmo/sim/step_costs_impl.h"

namespace dynmo::sim {
namespace {

// Times in nanoseconds. The parts of idle time are differences of them.
struct Levels {
  std::int64_t step = 0;
  std::int64_t free_step = 0;  // if messages and reductions were free and immediate
  std::int64_t pace = 0;       // busy time of the busiest rank
  std::int64_t even_pace = 0;  // the same if all ranks had the speed of the fastest
};

// Returns the levels of a step. They satisfy step >= free_step, because messages only delay
// actions. They satisfy free_step >= pace, because a rank runs one action at a time, and updates
// start when all ranks have ended.
Levels levels_of(const ReplayResult& replayed, const StepCosts& costs) {
  Levels levels;
  std::int64_t update = 0;
  for (std::size_t r = 0; r < replayed.ranks.size(); ++r) {
    const RankReplay& rank = replayed.ranks[r];
    levels.step = std::max(levels.step, rank.end);
    levels.free_step = std::max(levels.free_step, rank.free_end);
    levels.pace = std::max(levels.pace, rank.busy + costs.update[r]);
    levels.even_pace = std::max(levels.even_pace, costs.work[r]);
    update = std::max(update, costs.update[r]);
  }
  levels.step += update;
  levels.free_step += update;
  // A higher speed makes no rank slower, except by the rounding of times above 2^53 ns.
  levels.even_pace = std::min(levels.even_pace, levels.pace);
  return levels;
}

// Splits idle = (step - free_step) + (free_step - pace) + (pace - busy). The last term is due to
// stragglers as far as equal speeds would lower the pace.
IdleSplit split_idle(const Levels& levels, std::int64_t busy) {
  const std::int64_t behind = levels.pace - busy;
  const std::int64_t straggler = std::min(behind, levels.pace - levels.even_pace);
  return {.fill_drain = Nanoseconds{levels.free_step - levels.pace},
          .imbalance = Nanoseconds{behind - straggler},
          .communication = Nanoseconds{levels.step - levels.free_step},
          .straggler = Nanoseconds{straggler}};
}

void add_fractions(SimResult& result) {
  const double whole =
      static_cast<double>(result.step_time.count()) * static_cast<double>(result.ranks.size());
  if (whole == 0) return;
  const auto fraction = [&](auto part) {  // sums of all ranks may be above 2^63 ns
    double sum = 0;
    for (const RankUsage& rank : result.ranks) sum += static_cast<double>(part(rank).count());
    return sum / whole;
  };
  result.bubble = fraction([](const RankUsage& r) { return r.idle; });
  result.bubble_split = {
      .fill_drain = fraction([](const RankUsage& r) { return r.split.fill_drain; }),
      .imbalance = fraction([](const RankUsage& r) { return r.split.imbalance; }),
      .communication = fraction([](const RankUsage& r) { return r.split.communication; }),
      .straggler = fraction([](const RankUsage& r) { return r.split.straggler; })};
}

SimResult summary(ReplayResult replayed, const StepCosts& costs) {
  SimResult result;
  const Levels levels = levels_of(replayed, costs);
  result.step_time = Nanoseconds{levels.step};
  for (std::size_t r = 0; r < replayed.ranks.size(); ++r) {
    const RankReplay& rank = replayed.ranks[r];
    const std::int64_t busy = rank.busy + costs.update[r];
    result.ranks.push_back({.busy = Nanoseconds{busy},
                            .idle = Nanoseconds{levels.step - busy},
                            .split = split_idle(levels, busy),
                            .peak_activation = Bytes{rank.peak_stash},
                            .peak_memory = Bytes{costs.state[r] + rank.peak_stash}});
  }
  add_fractions(result);
  result.timeline = std::move(replayed.timeline);
  result.memory = std::move(replayed.memory);
  return result;
}

Error error_of(std::optional<schedule::Fault> fault) {
  return Error{ErrorCode::kBadInput, std::move(fault.value().message)};
}

// Replays a schedule. Requires one that keeps rules 1 to 4 of the checker.
Expected<SimResult> simulate_lists(const schedule::Schedule& lowered,
                                   std::span<const StageCost> stages, const cost::Cluster& cluster,
                                   const SimOptions& options) {
  DYNMO_ASSIGN(const StepCosts costs, step_costs(lowered.shape, stages, cluster));
  ReplayResult replayed = replay(lowered, costs, options);
  if (replayed.is_stuck) return error_of(find_fault(lowered));
  return summary(std::move(replayed), costs);
}

}  // namespace

Expected<CheckedSchedule> CheckedSchedule::make(schedule::Schedule lowered) {
  if (auto fault = find_fault_in_lists(lowered)) return error_of(std::move(fault));
  return CheckedSchedule(std::move(lowered));
}

Expected<SimResult> simulate(const CheckedSchedule& checked, std::span<const StageCost> stages,
                             const cost::Cluster& cluster, SimOptions options) {
  return simulate_lists(checked.schedule(), stages, cluster, options);
}

Expected<SimResult> simulate(const schedule::Schedule& lowered, std::span<const StageCost> stages,
                             const cost::Cluster& cluster, SimOptions options) {
  if (auto fault = find_fault_in_lists(lowered)) return error_of(std::move(fault));
  return simulate_lists(lowered, stages, cluster, options);
}

Nanoseconds all_reduce_time(Bytes gradients, int replicas, const cost::Link& link) {
  DYNMO_CHECK(gradients >= Bytes{0} && replicas >= 1,
              "bytes of 0 or more over 1 or more replicas, got {} over {}", gradients.value,
              replicas);
  if (replicas == 1) return Nanoseconds{0};
  const double rounds = 2.0 * (replicas - 1);
  const double share = static_cast<double>(gradients.value) / replicas;
  const double seconds = rounds * (link.latency_s + share / link.bandwidth_bytes_per_s);
  return Nanoseconds{std::llround(std::min(seconds * 1e9, 0x1p62))};
}

}  // namespace dynmo::sim
