// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/refine.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/plan/balance_impl.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/replayer_impl.h"
#include "dynmo/plan/step_bound_impl.h"

namespace dynmo::plan {
namespace {

constexpr std::int64_t kMostActions = 2'000'000;  // replayed; some tens of milliseconds

// Computes the StepBound of cuts from prefix sums over the layers.
class LowerBound {
 public:
  LowerBound(const BalanceProblem& problem, const internal::Chain* recomputing)
      : problem_(problem), recomputing_(recomputing), sums_{{}} {
    const auto frozen = static_cast<std::size_t>(problem.model.frozen_layers());
    for (std::size_t i = 0; i < problem.model.layers.size(); ++i) {
      StageWork sum = sums_.back();
      sum.add(problem.model.layers[i], i >= frozen, problem.schedule);
      sums_.push_back(sum);
    }
  }

  // Returns the bound, or the longest time if the cut does not fit the memory.
  [[nodiscard]] Nanoseconds of(const std::vector<int>& counts) const {
    StepBound bound;
    std::size_t first = 0;
    for (std::size_t r = 0; r < counts.size(); ++r) {
      const std::size_t end = first + static_cast<std::size_t>(counts[r]);
      StageWork work = between(sums_[first], sums_[end]);
      if (recomputing_ != nullptr) {
        const auto added = recomputing_->added_s(static_cast<int>(r), static_cast<int>(first),
                                                 static_cast<int>(end));
        if (!added) return Nanoseconds::max();
        work.backward_s += *added;
      }
      bound = bound.with(work, problem_.cluster.ranks[r].speed, problem_.micro_batches);
      first = end;
    }
    return to_nanoseconds(bound.bound_s);
  }

 private:
  static StageWork between(const StageWork& before, const StageWork& end) {
    return {.forward_s = end.forward_s - before.forward_s,
            .backward_s = end.backward_s - before.backward_s,
            .later_s = end.later_s - before.later_s,
            .update_s = end.update_s - before.update_s,
            .trains = end.trains};
  }

  const BalanceProblem& problem_;
  const internal::Chain* recomputing_;
  std::vector<StageWork> sums_;
};

struct Cut {
  std::vector<int> counts;
  Nanoseconds time{0};
};

// Returns the first neighbour with a shorter replay, or nullopt.
Expected<std::optional<Cut>> shorter(const Cut& cut, const LowerBound& bound, Replayer& replayer) {
  std::optional<Cut> found;
  if (replayer.actions() > kMostActions) return found;
  const auto bound_of = [&](const std::vector<int>& counts) { return bound.of(counts); };
  for (const auto& [move, least] : moves_below(cut.time, cut.counts, bound_of)) {
    if (replayer.actions() > kMostActions) break;
    std::vector<int> counts = move.of(cut.counts);
    DYNMO_ASSIGN(const auto time, replayer.step_time(counts));
    if (!time || *time >= cut.time) continue;
    found = Cut{std::move(counts), *time};
    break;
  }
  return found;
}

// Returns the layers of each rank if stage s is on rank s, or an empty list.
std::vector<int> counts_of(const Plan& plan) {
  if (plan.stages.size() != static_cast<std::size_t>(plan.ranks)) return {};
  std::vector<int> counts;
  for (std::size_t s = 0; s < plan.stages.size(); ++s) {
    if (plan.stages[s].rank.index() != s) return {};
    counts.push_back(plan.stages[s].layers.count);
  }
  return counts;
}

}  // namespace

bool refines(schedule::ScheduleKind kind) {
  return schedule::traits(kind).layout == schedule::StageLayout::kOneARank;
}

Expected<Refined> refine(std::span<const std::vector<int>> starts, const BalanceProblem& problem) {
  DYNMO_CHECK(refines(problem.schedule), "a schedule of one stage a rank, got {}",
              schedule::name(problem.schedule));
  std::optional<internal::Chain> recomputing;
  if (problem.recompute != Recompute::kNone) {
    DYNMO_ASSIGN(recomputing, internal::chain_of_ranks(problem));
  }
  const internal::Chain* const chain = recomputing ? &*recomputing : nullptr;
  const LowerBound bound(problem, chain);
  Replayer replayer(problem, problem.schedule, chain);
  std::optional<Cut> best;
  for (const std::vector<int>& start : starts) {
    DYNMO_ASSIGN(const auto time, replayer.step_time(start));
    if (!time) continue;
    Cut cut{start, *time};
    while (true) {
      DYNMO_ASSIGN(auto next, shorter(cut, bound, replayer));
      if (!next) break;
      cut = *std::move(next);
    }
    if (!best || cut.time < best->time) best = std::move(cut);
  }
  Refined refined{.counts = {}, .replays = replayer.replays()};
  if (best) refined.counts = std::move(best->counts);
  return refined;
}

Expected<std::vector<int>> refined(const std::vector<int>& cut, const BalanceProblem& problem) {
  std::vector<std::vector<int>> starts = {cut};
  const auto add = [&](std::vector<int> start) {
    const bool known = std::find(starts.begin(), starts.end(), start) != starts.end();
    if (start.size() == cut.size() && !known) starts.push_back(std::move(start));
  };
  DYNMO_ASSIGN(std::vector<int> even, balance(Balancer::kUniform, problem));
  add(std::move(even));
  if (problem.current != nullptr) add(counts_of(*problem.current));
  DYNMO_ASSIGN(Refined found, refine(starts, problem));
  if (found.counts.empty()) return cut;
  return std::move(found.counts);
}

}  // namespace dynmo::plan
