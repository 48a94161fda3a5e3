// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/search.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "dynmo/core/rng.h"
#include "dynmo/plan/anneal_impl.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/propose.h"
#include "dynmo/plan/search_impl.h"
#include "dynmo/schedule/generate.h"

namespace dynmo::plan {
namespace {

using internal::Annealer;
using internal::Starts;
using schedule::ScheduleKind;

constexpr std::int64_t kActionsAnEvaluation = 1536;
constexpr std::int64_t kEvaluationsAStart = 8000;  // of every placement

struct Placement {
  std::string name;
  std::vector<Rank> ranks;  // by stage
};

// Returns the placements to anneal on, without those that would leave most stages without a layer.
std::vector<Placement> portfolio(const SearchProblem& problem) {
  const int ranks = problem.cluster.size();
  std::vector<Placement> placements;
  placements.push_back({"adaptive/single", schedule::wave_placement(ranks, 1)});
  if (ranks == 1) return placements;
  for (const int stages : {2, 4, 6, 8}) {
    if (ranks * stages > 2 * problem.model.size()) continue;
    placements.push_back({stages == 2 ? "adaptive/v" : fmt::format("adaptive/wave-{}", stages),
                          schedule::wave_placement(ranks, stages)});
  }
  for (const int stages : {2, 4}) {
    if (ranks * stages > 2 * problem.model.size()) continue;
    placements.push_back(
        {fmt::format("adaptive/loop-{}", stages), schedule::loop_placement(ranks, stages)});
  }
  return placements;
}

// Keeps the best candidate so far, and for advice the candidate that comes nearest to fitting.
class Candidates {
 public:
  Candidates(const SearchProblem& problem, const SearchOptions& options, SearchResult& result)
      : problem_(problem),
        recompute_(options.recompute),
        accepts_(options.accepts),
        result_(result) {}

  void enter(std::string name, const Plan& plan, Judged judged) {
    Evaluation& evaluation = judged.evaluation;
    const bool fits = fits_memory(evaluation.result, problem_.cluster);
    result_.candidates.push_back({name, evaluation.step_time_s, fits});
    if (accepts_ != nullptr) {
      if (const auto accepted = (*accepts_)(plan); !accepted) {
        if (!rejection_) rejection_ = accepted.error();
        return;
      }
    }
    if (!fits) {
      note_excess(evaluation);
      return;
    }
    if (won_ && evaluation.result.step_time >= result_.evaluation.result.step_time) return;
    won_ = true;
    result_.plan = plan;
    result_.evaluation = std::move(evaluation);
    result_.recomputed = std::move(judged.recomputed);
    result_.winner = std::move(name);
  }

  [[nodiscard]] Expected<Judged> judged(const Plan& plan) const {
    return judge(recompute_, plan, {problem_.model, problem_.cluster, problem_.micro_batches});
  }

  // Enters a plan as a candidate if it has a replay; its schedule may not take its shape. Returns
  // whether it recomputes or lacks memory.
  bool try_plan(std::string name, const Plan& plan) {
    auto judged = this->judged(plan);
    if (!judged) {
      refuse(judged.error());
      return false;
    }
    const bool tight = !judged->recomputed.empty();
    enter(std::move(name), plan, *std::move(judged));
    return tight;
  }

  // Notes why a plan is no candidate.
  void refuse(const Error& error) {
    if (!refusal_ ||
        (refusal_->code != ErrorCode::kBadInput && error.code == ErrorCode::kBadInput)) {
      refusal_ = error;
    }
  }

  [[nodiscard]] bool won() const { return won_; }

  // Returns why no candidate won. If `annealed`, orders were sought for any cut, so only memory can
  // be the reason.
  [[nodiscard]] Error infeasible(bool annealed) const {
    if (rank_ < 0 && rejection_) return *rejection_;
    if (rank_ < 0 && refusal_ && !annealed) return *refusal_;
    const std::string_view again = recompute_ == Recompute::kNone ? "" : " with layers recomputed";
    if (rank_ < 0) {
      return make_error(ErrorCode::kInfeasible,
                        "no plan of {} layers on {} ranks fits memory{}, not even for one "
                        "micro-batch at a time: use ranks with more memory, more ranks, or smaller "
                        "micro-batches",
                        problem_.model.size(), problem_.cluster.size(), again);
    }
    return make_error(
        ErrorCode::kInfeasible,
        "no plan of {} layers on {} ranks fits memory{}; the nearest, {}, takes {} on "
        "rank {}, which has {}: use ranks with more memory, more ranks, or smaller "
        "micro-batches",
        problem_.model.size(), problem_.cluster.size(), again, nearest_,
        format_bytes(problem_.cluster.ranks[static_cast<std::size_t>(rank_)].memory +
                     Bytes{excess_}),
        rank_, format_bytes(problem_.cluster.ranks[static_cast<std::size_t>(rank_)].memory));
  }

 private:
  void note_excess(const Evaluation& evaluation) {
    std::int64_t max_excess = 0;
    int rank = -1;
    for (std::size_t r = 0; r < evaluation.result.ranks.size(); ++r) {
      const Bytes excess =
          evaluation.result.ranks[r].peak_memory - problem_.cluster.ranks[r].memory;
      if (excess.value <= max_excess) continue;
      max_excess = excess.value;
      rank = static_cast<int>(r);
    }
    if (max_excess >= excess_) return;
    excess_ = max_excess;
    rank_ = rank;
    nearest_ = result_.candidates.back().name;
  }

  const SearchProblem& problem_;
  Recompute recompute_;
  const PlanFilter* accepts_;
  SearchResult& result_;
  bool won_ = false;
  std::int64_t excess_ = std::numeric_limits<std::int64_t>::max();
  int rank_ = -1;
  std::string nearest_;
  std::optional<Error> refusal_;
  std::optional<Error> rejection_;  // why the filter did not take the first that it refused
};

// Returns whether sums of times stay inside 64 bits together with the number of a rank
// (adaptive.h). A step with larger sums has other problems.
bool countable(const SearchProblem& problem) {
  double slowest = problem.cluster.ranks.front().speed;
  for (const cost::ClusterRank& rank : problem.cluster.ranks) {
    slowest = std::min(slowest, rank.speed);
  }
  double seconds = 0;
  double message = 0;
  for (int i = 0; i < problem.model.size(); ++i) {
    seconds += cost::work_s(problem.model, i, 1) / std::min(slowest, 1.0);
    const auto bytes =
        static_cast<double>(problem.model.layers[static_cast<std::size_t>(i)].boundary_bytes.value);
    for (const cost::Link& link : problem.cluster.links()) {
      message = std::max(message, link.latency_s + bytes / link.bandwidth_bytes_per_s);
    }
  }
  return problem.micro_batches * (seconds + 2 * message * problem.model.size()) <
         std::min(1e6, 4e9 / problem.cluster.size());
}

// Returns whether filling and draining take a large part of a step, and a run has so many actions
// that few runs are affordable.
bool large(const SearchProblem& problem) {
  return problem.cluster.size() > 8 &&
         std::int64_t{6} * problem.cluster.size() * problem.micro_batches > kActionsAnEvaluation;
}

// Anneals every start for a short time, the best third of them longer, and the best third of those
// again. For a large problem it anneals only the best third of the starts, because a share for each
// would be too short.
void anneal_portfolio(const SearchProblem& problem, const SearchOptions& options,
                      Recompute recompute, Candidates& candidates, SearchResult& result) {
  if (!countable(problem)) return;
  const internal::Prefixes model(problem.model, recompute);
  const std::vector<Placement> placements = portfolio(problem);
  std::vector<std::unique_ptr<Annealer>> running;
  // Where annealing ends depends much on where it starts: a larger budget first buys more starts.
  const auto starts = std::clamp<std::int64_t>(options.evaluations / kEvaluationsAStart, 1, 8);
  const bool few_runs = large(problem);
  const std::int64_t budget = options.evaluations * kActionsAnEvaluation;
  const std::int64_t start_share =
      budget * (few_runs ? 1 : 3) / 4 / starts / static_cast<std::int64_t>(placements.size());
  std::uint64_t index = 0;
  for (std::int64_t start = 0; start < starts; ++start) {
    for (const Placement& one : placements) {
      running.push_back(
          std::make_unique<Annealer>(one.name, model, problem.cluster, problem.micro_batches,
                                     one.ranks, few_runs ? Starts::kFilled : Starts::kLevel,
                                     mix_key({0x5EA2C4, options.seed, index++}), start_share));
    }
  }
  std::int64_t spent = 0;
  for (const auto& annealer : running) spent += annealer->spent();
  std::size_t left = running.size();
  const auto keep_best_third = [&] {
    std::stable_sort(running.begin(), running.begin() + static_cast<std::ptrdiff_t>(left),
                     [](const auto& a, const auto& b) { return a->best() < b->best(); });
    left = std::max<std::size_t>(1, left / 3);
  };
  if (few_runs) keep_best_third();
  for (int rounds = 3; rounds > 0; --rounds) {
    const std::int64_t share =
        std::max<std::int64_t>(0, budget - spent) / rounds / static_cast<std::int64_t>(left);
    for (std::size_t i = 0; i < left; ++i) {
      const std::int64_t before = running[i]->spent();
      running[i]->anneal(share, 8000);
      spent += running[i]->spent() - before;
    }
    keep_best_third();
  }
  result.evaluations += spent / kActionsAnEvaluation;
  // The best of every placement, which stands before the others of its placement.
  std::stable_sort(running.begin(), running.end(),
                   [](const auto& a, const auto& b) { return a->best() < b->best(); });
  for (const Placement& one : placements) {
    const auto best = std::find_if(running.begin(), running.end(),
                                   [&](const auto& other) { return other->name() == one.name; });
    if ((*best)->best() == Annealer::kInfeasible) continue;
    const bool again = recompute == Recompute::kAuto;
    candidates.try_plan(one.name + (again ? ", recomputed" : ""), (*best)->plan());
  }
}

Expected<void> check_inputs(const SearchProblem& problem, const SearchOptions& options) {
  DYNMO_TRY(cost::validate(problem.model, problem.micro_batches));
  DYNMO_TRY(cost::validate(problem.cluster));
  if (options.evaluations >= 0 && options.evaluations <= kMaxEvaluations) return {};
  return make_error(ErrorCode::kBadInput, "evaluations is {}, wanted 0 to 2^40",
                    options.evaluations);
}

// Returns whether there is an even 1F1B plan, and it needs more memory than the ranks have.
bool lacks_memory(const SearchProblem& problem) {
  const auto counts = balance(Balancer::kUniform, {problem.costs()});
  if (!counts) return false;
  const auto even = evaluate(make_plan(*counts, ScheduleKind::k1F1B), problem);
  return even && !fits_memory(even->result, problem.cluster);
}

// Tries the balancers' cuts in orders of the list scheduler. Annealing need not find these if
// memory leaves it few.
void try_ordered_cuts(const SearchProblem& problem, Candidates& candidates) {
  for (const Balancer balancer : balancers()) {
    if (balancer == Balancer::kBlocks || balancer == Balancer::kSearch) continue;
    BalanceProblem asked{problem.costs(), ScheduleKind::kAdaptive};
    asked.recompute = Recompute::kAuto;
    const auto ordered = propose(balancer, asked);
    if (!ordered) continue;
    candidates.try_plan(fmt::format("adaptive/{}", name(balancer)), ordered->plan);
  }
}

}  // namespace

Expected<SearchResult> search(const SearchProblem& problem, const SearchOptions& options) {
  DYNMO_TRY(check_inputs(problem, options));
  SearchResult result;
  Candidates candidates(problem, options, result);
  const auto wanted = [&](ScheduleKind kind) {
    return !options.schedule || *options.schedule == kind;
  };
  if (problem.current != nullptr && wanted(problem.current->schedule)) {
    DYNMO_TRY(validate(*problem.current, problem.model.size()));
    auto judged = candidates.judged(*problem.current);
    // An order is for one number of micro-batches. With another it cannot stay, even if the layers
    // do.
    if (!judged && problem.current->schedule != ScheduleKind::kAdaptive) return judged.error();
    if (judged) candidates.enter("current", *problem.current, *std::move(judged));
  }
  bool tight = options.schedule == ScheduleKind::kAdaptive && lacks_memory(problem);
  const internal::Templates templates = internal::templates(problem, options);
  for (const Error& refusal : templates.refusals) {
    candidates.refuse(refusal);
    tight = tight || refusal.code == ErrorCode::kInfeasible;
  }
  for (const internal::Template& made : templates.made) {
    const bool lacks = candidates.try_plan(made.name, made.plan);
    // GPipe stashes every micro-batch, so its lack of memory says nothing of other schedules.
    tight = tight || (made.plain && lacks && made.plan.schedule != ScheduleKind::kGpipe);
  }
  if (wanted(ScheduleKind::kAdaptive)) {
    if (options.recompute == Recompute::kAuto) try_ordered_cuts(problem, candidates);
    const bool whole = options.recompute == Recompute::kWhole;
    anneal_portfolio(problem, options, whole ? Recompute::kWhole : Recompute::kNone, candidates,
                     result);
    if (tight && options.recompute == Recompute::kAuto) {
      anneal_portfolio(problem, options, Recompute::kAuto, candidates, result);
    }
  }
  if (!candidates.won()) {
    return candidates.infeasible(wanted(ScheduleKind::kAdaptive) && countable(problem));
  }
  return result;
}

}  // namespace dynmo::plan
