// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/refine.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/replayer_impl.h"

namespace dynmo::plan {
namespace {

constexpr std::int64_t kMostActions = 2'000'000;  // replayed; some tens of milliseconds

// No replay of a cut is shorter: rank r cannot start before the first micro-batch has passed the
// ranks before it, runs all micro-batches, and its last backward (of zb-h1, whose weight gradients
// wait: input gradient) has to pass down again.
class LowerBound {
 public:
  explicit LowerBound(const BalanceProblem& problem) : problem_(problem), sums_{{}} {
    const bool waits = problem.schedule == schedule::ScheduleKind::kZbH1;
    const int frozen = problem.model.frozen_layers();
    for (std::size_t i = 0; i < problem.model.layers.size(); ++i) {
      const cost::LayerCost& layer = problem.model.layers[i];
      Work sum = sums_.back();
      sum.forward_s += layer.forward_s;
      if (static_cast<int>(i) >= frozen) sum.backward_s += layer.backward_input_s;
      if (!layer.frozen) (waits ? sum.later_s : sum.backward_s) += layer.backward_weight_s;
      sums_.push_back(sum);
    }
  }

  [[nodiscard]] Nanoseconds of(const std::vector<int>& counts) const {
    const int micro_batches = problem_.micro_batches;
    double most = 0;
    double fill = 0;
    double drain = 0;
    std::size_t first = 0;
    for (std::size_t r = 0; r < counts.size(); ++r) {
      const std::size_t end = first + static_cast<std::size_t>(counts[r]);
      const double speed = problem_.cluster.ranks[r].speed;
      const double forward = (sums_[end].forward_s - sums_[first].forward_s) / speed;
      const double backward = (sums_[end].backward_s - sums_[first].backward_s) / speed;
      const double later = (sums_[end].later_s - sums_[first].later_s) / speed;
      const double own = fill + micro_batches * (forward + backward);
      most = std::max({most, own + micro_batches * later, own + (backward > 0 ? drain : 0)});
      fill += forward;
      drain += backward;
      first = end;
    }
    return to_nanoseconds(most);
  }

 private:
  struct Work {
    double forward_s = 0;
    double backward_s = 0;
    double later_s = 0;  // weight gradients that wait
  };

  const BalanceProblem& problem_;
  std::vector<Work> sums_;  // of the layers before
};

struct Neighbour {
  Nanoseconds bound{0};
  std::vector<int> counts;
};

// One layer from one rank to another.
std::vector<Neighbour> neighbours(const std::vector<int>& counts, const LowerBound& bound,
                                  Nanoseconds below) {
  std::vector<Neighbour> result;
  for (std::size_t from = 0; from < counts.size(); ++from) {
    if (counts[from] == 1) continue;
    for (std::size_t to = 0; to < counts.size(); ++to) {
      if (to == from) continue;
      std::vector<int> moved = counts;
      --moved[from];
      ++moved[to];
      const Nanoseconds least = bound.of(moved);
      if (least < below) result.push_back({least, std::move(moved)});
    }
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const Neighbour& a, const Neighbour& b) { return a.bound < b.bound; });
  return result;
}

struct Cut {
  std::vector<int> counts;
  Nanoseconds time{0};
};

// The first neighbour with a shorter replay, or nothing.
Expected<std::optional<Cut>> shorter(const Cut& cut, const LowerBound& bound, Replayer& replayer) {
  for (Neighbour& neighbour : neighbours(cut.counts, bound, cut.time)) {
    if (replayer.actions() > kMostActions) break;
    DYNMO_ASSIGN(const auto time, replayer.step_time(neighbour.counts));
    if (!time || *time >= cut.time) continue;
    return std::optional(Cut{std::move(neighbour.counts), *time});
  }
  return std::optional<Cut>();
}

// Layers a rank of a plan of one stage a rank, in the cluster's order; empty of any other plan.
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
  const LowerBound bound(problem);
  Replayer replayer(problem.model, problem.cluster, problem.micro_batches, problem.schedule);
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
