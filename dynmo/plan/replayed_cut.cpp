// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <utility>

#include "dynmo/core/units.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/replayer_impl.h"
#include "dynmo/plan/search_impl.h"

namespace dynmo::plan::internal {
namespace {

constexpr double kMaxListedCuts = 50'000;

// Layers of each stage, and a lower bound of their step time.
struct TimedCut {
  double bound = 0;
  std::vector<int> counts;
};

double number_of_cuts(int layers, int stages) {
  double cuts = 1;
  for (int i = 1; i < stages; ++i) cuts *= static_cast<double>(layers - i) / i;
  return cuts;
}

// Replays cuts and keeps the best of them.
class CutSearch {
 public:
  explicit CutSearch(const ReplayedCutProblem& problem)
      : problem_(problem), replayer_(problem, problem.kind, problem.placement), work_s_(1, 0.0) {
    for (const double work : cost::layer_work_s(problem.model, problem.micro_batches)) {
      work_s_.push_back(work_s_.back() + work);
    }
  }

  Expected<void> start(std::span<const std::vector<int>> starts) {
    for (const std::vector<int>& counts : starts) DYNMO_TRY(replay(counts));
    return {};
  }

  // Replays every cut whose bound is below the best.
  Expected<void> try_all() {
    std::vector<TimedCut> cuts;
    std::vector<int> counts;
    list(counts, problem_.model.size(), cuts);
    std::ranges::stable_sort(cuts, {}, &TimedCut::bound);
    for (const TimedCut& cut : cuts) {
      if (is_spent() || cut.bound >= best_s()) break;
      DYNMO_TRY(replay(cut.counts));
    }
    return {};
  }

  // Moves one layer at a time while that shortens the step.
  Expected<void> descend() {
    for (bool shorter = !best_.empty(); shorter && !is_spent();) {
      const std::vector<int> from = best_;
      const auto bound_of = [&](const std::vector<int>& counts) { return bound_s(counts); };
      for (const auto& [move, bound] : moves_below(best_s(), from, bound_of)) {
        if (is_spent() || bound >= best_s()) break;
        DYNMO_TRY(replay(move.of(from)));
        if (best_ != from) break;
      }
      shorter = best_ != from;
    }
    return {};
  }

  std::optional<std::vector<int>> best() && {
    return best_.empty() ? std::nullopt : std::optional(std::move(best_));
  }

 private:
  Expected<void> replay(const std::vector<int>& counts) {
    DYNMO_ASSIGN(const auto time, replayer_.step_time(counts));
    if (!time || (!best_.empty() && *time >= time_)) return {};
    time_ = *time;
    best_ = counts;
    return {};
  }

  [[nodiscard]] bool is_spent() const { return replayer_.actions() >= problem_.max_actions; }

  // Returns the greatest bound of a cut that may be better than the best, or infinity if none fits
  // yet. A replay rounds each action to nanoseconds, once as a stage's cost and once on its rank.
  [[nodiscard]] double best_s() const {
    if (best_.empty()) return std::numeric_limits<double>::infinity();
    double slowest = 1;
    for (const auto& rank : problem_.cluster.ranks) slowest = std::min(slowest, rank.speed);
    const double roundings =
        (3.0 * problem_.micro_batches + 1) * static_cast<double>(problem_.placement.size());
    return to_seconds(time_) * (1 + 1e-9) + 1e-9 * (1 + 1 / slowest) * roundings;
  }

  // Returns the seconds of the busiest rank for all micro-batches.
  [[nodiscard]] double bound_s(const std::vector<int>& counts) const {
    std::vector<double> rank_s(problem_.cluster.ranks.size(), 0.0);
    std::size_t first = 0;
    for (std::size_t s = 0; s < counts.size(); ++s) {
      const std::size_t end = first + static_cast<std::size_t>(counts[s]);
      rank_s[problem_.placement[s].index()] += work_s_[end] - work_s_[first];
      first = end;
    }
    double most = 0;
    for (std::size_t r = 0; r < rank_s.size(); ++r) {
      most = std::max(most, rank_s[r] / problem_.cluster.ranks[r].speed);
    }
    return most * problem_.micro_batches;
  }

  void list(std::vector<int>& counts, int left, std::vector<TimedCut>& cuts) const {
    const int open = static_cast<int>(problem_.placement.size() - counts.size());
    for (int take = open == 1 ? left : 1; take <= left - (open - 1); ++take) {
      counts.push_back(take);
      if (open > 1) {
        list(counts, left - take, cuts);
      } else if (const double bound = bound_s(counts); bound < best_s()) {
        cuts.push_back({bound, counts});
      }
      counts.pop_back();
    }
  }

  const ReplayedCutProblem& problem_;
  Replayer replayer_;
  std::vector<double> work_s_;  // of the layers before
  std::vector<int> best_;
  Nanoseconds time_{0};
};

}  // namespace

Expected<std::optional<std::vector<int>>> replayed_cut(const ReplayedCutProblem& problem,
                                                       std::span<const std::vector<int>> starts) {
  CutSearch search(problem);
  DYNMO_TRY(search.start(starts));
  const int stages = static_cast<int>(problem.placement.size());
  if (number_of_cuts(problem.model.size(), stages) <= kMaxListedCuts) {
    DYNMO_TRY(search.try_all());
  } else {
    DYNMO_TRY(search.descend());
  }
  return std::move(search).best();
}

}  // namespace dynmo::plan::internal
