// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/simulated_optimum.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/replayer_impl.h"
#include "dynmo/plan/step_bound_impl.h"

namespace dynmo::plan {
namespace {

constexpr std::size_t kMaxCandidates = 200'000;
constexpr std::int64_t kMaxNodes = 20'000'000;

struct Candidate {
  double bound_s = 0;
  std::vector<int> counts;
};

// Enumerates cuts rank by rank and keeps those whose bound does not exceed `limit_s`.
//
// The bound is StepBound. It assumes that later ranks share the rest in proportion to their speeds.
class Enumerator {
 public:
  Enumerator(const BalanceProblem& problem, double limit_s)
      : problem_(problem),
        micro_batches_(problem.micro_batches),
        layers_(problem.model.size()),
        frozen_(problem.model.frozen_layers()),
        limit_s_(limit_s) {
    add_suffix_sums();
  }

  // Returns false if there are too many cuts.
  bool enumerate() {
    extend(0, 0, {});
    return candidates_.size() <= kMaxCandidates && nodes_ <= kMaxNodes;
  }

  std::vector<Candidate> take() && { return std::move(candidates_); }

 private:
  void add(StageWork& work, int layer) const {
    work.add(problem_.model.layers[static_cast<std::size_t>(layer)], layer >= frozen_,
             problem_.schedule);
  }

  void add_suffix_sums() {
    remaining_.assign(static_cast<std::size_t>(layers_) + 1, 0.0);
    for (int i = layers_ - 1; i >= 0; --i) {
      StageWork work;
      add(work, i);
      remaining_[static_cast<std::size_t>(i)] = remaining_[static_cast<std::size_t>(i) + 1] +
                                                work.forward_s + work.backward_s + work.later_s;
    }
    const std::size_t ranks = problem_.cluster.ranks.size();
    speeds_.assign(ranks + 1, 0.0);
    for (std::size_t r = ranks; r-- > 0;) {
      speeds_[r] = speeds_[r + 1] + problem_.cluster.ranks[r].speed;
    }
  }

  void extend(int first, std::size_t rank, const StepBound& prefix) {
    const std::size_t ranks = problem_.cluster.ranks.size();
    const int most = layers_ - static_cast<int>(ranks - rank - 1);
    const bool last = rank + 1 == ranks;
    StageWork work;
    for (int end = first + 1; end <= most; ++end) {
      add(work, end - 1);
      if (last && end < most) continue;
      if (++nodes_ > kMaxNodes || candidates_.size() > kMaxCandidates) return;
      const StepBound next = prefix.with(work, problem_.cluster.ranks[rank].speed, micro_batches_);
      if (next.bound_s > limit_s_) return;  // more layers only make it worse
      counts_.push_back(end - first);
      if (last) {
        candidates_.push_back({next.bound_s, counts_});
      } else if (next.fill_s + micro_batches_ * remaining_[static_cast<std::size_t>(end)] /
                                   speeds_[rank + 1] <=
                 limit_s_) {
        extend(end, rank + 1, next);
      }
      counts_.pop_back();
    }
  }

  const BalanceProblem& problem_;
  int micro_batches_;
  int layers_;
  int frozen_;
  double limit_s_;
  std::vector<double> remaining_;  // F + B of all layers from here on
  std::vector<double> speeds_;     // of all ranks from here on
  std::vector<int> counts_;
  std::vector<Candidate> candidates_;
  std::int64_t nodes_ = 0;
};

// Returns the bound that a cut of this step time may have. Replays round each action to
// nanoseconds, once as a stage's cost and once on its rank. At most 2M + 1 actions of each rank lie
// on a path. They also add in another order.
double loosened(const BalanceProblem& problem, Nanoseconds step_time) {
  double slowest = 1;
  for (const auto& rank : problem.cluster.ranks) slowest = std::min(slowest, rank.speed);
  const double roundings =
      (2.0 * problem.micro_batches + 1) * static_cast<double>(problem.cluster.ranks.size());
  return to_seconds(step_time) * (1 + 1e-9) + 1e-9 * (1 + 1 / slowest) * roundings;
}

// The best of the balancers' cuts, or nothing if none fits the memory.
Expected<std::optional<Nanoseconds>> first_limit(const BalanceProblem& problem,
                                                 Replayer& replayer) {
  std::optional<Nanoseconds> best;
  for (const Balancer balancer : {Balancer::kOptimal, Balancer::kTime, Balancer::kUniform}) {
    const auto counts = balance(balancer, problem);
    if (!counts && counts.error().code == ErrorCode::kInfeasible) continue;
    if (!counts) return counts.error();
    DYNMO_ASSIGN(const auto time, replayer.step_time(*counts));
    if (time && (!best || *time < *best)) best = time;
  }
  return best;
}

}  // namespace

Expected<std::optional<SimulatedOptimum>> simulated_optimum(const Costs& costs,
                                                            schedule::ScheduleKind schedule) {
  const BalanceProblem problem{costs, schedule};
  // Checks the input for all that follows.
  DYNMO_ASSIGN(const auto uniform, balance(Balancer::kUniform, problem));
  DYNMO_TRY(evaluate(make_plan(uniform, schedule), costs));

  Replayer replayer(costs, schedule);
  DYNMO_ASSIGN(const auto limit, first_limit(problem, replayer));
  Enumerator enumerator(
      problem, limit ? loosened(problem, *limit) : std::numeric_limits<double>::infinity());
  if (!enumerator.enumerate()) return std::optional<SimulatedOptimum>();
  std::vector<Candidate> candidates = std::move(enumerator).take();
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.bound_s < b.bound_s; });
  std::optional<Nanoseconds> best;
  const std::vector<int>* chosen = nullptr;
  for (const Candidate& candidate : candidates) {
    if (best && candidate.bound_s > loosened(problem, *best)) break;
    DYNMO_ASSIGN(const auto time, replayer.step_time(candidate.counts));
    if (!time) continue;
    if (!best || *time < *best || (*time == *best && candidate.counts < *chosen)) {
      best = time;
      chosen = &candidate.counts;
    }
  }
  if (chosen == nullptr) {
    // The balancer knows how much memory would do.
    DYNMO_TRY(balance(Balancer::kOptimal, problem));
    return make_error(ErrorCode::kInfeasible,
                      "no cut of {} layers over {} ranks fits their memory: give the ranks more "
                      "memory, or use more of them",
                      costs.model.size(), costs.cluster.size());
  }
  return std::optional(SimulatedOptimum{.plan = make_plan(*chosen, schedule),
                                        .step_time_s = to_seconds(*best),
                                        .simulated = replayer.replays()});
}

Expected<double> step_time_bound_s(const Costs& costs) {
  // The balancer's idea of what a cut stashes is stricter than a replay's.
  cost::Cluster roomy = costs.cluster;
  for (cost::ClusterRank& rank : roomy.ranks) rank.memory = cost::kUnlimitedMemory;
  DYNMO_ASSIGN(const auto counts,
               balance(Balancer::kOptimal, {{costs.model, roomy, costs.micro_batches}}));
  const auto times = rank_times_s(make_plan(counts, schedule::ScheduleKind::k1F1B), costs);
  // The balancer counts work in parts, which are rounded.
  return costs.micro_batches * *std::max_element(times.begin(), times.end()) * (1 - 1e-6);
}

}  // namespace dynmo::plan
