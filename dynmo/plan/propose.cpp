// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/propose.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "dynmo/plan/cuts_impl.h"
#include "dynmo/plan/place.h"
#include "dynmo/schedule/adaptive.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

bool same_but_generation(const Plan& a, const Plan& b) {
  return a.ranks == b.ranks && a.stages == b.stages && a.schedule == b.schedule &&
         a.order == b.order;
}

// Returns the problem of ordering the plan's actions, with the layers `again` recomputed. The saved
// tensors of these layers exist from I to W.
schedule::AdaptiveProblem ordering_problem(const Plan& plan, const BalanceProblem& problem,
                                           const LayerSet& again) {
  schedule::AdaptiveProblem ordering{
      .shape = shape_of(plan, problem.micro_batches, problem.model.frozen_layers()),
      .stages = {},
      .stash_limit = {}};
  const std::vector<sim::StageCost> costs = stage_costs(plan, recomputed(problem.model, again));
  const std::vector<sim::StageCost> whole = stage_costs(plan, problem.model);
  for (const cost::ClusterRank& rank : problem.cluster.ranks) {
    ordering.stash_limit.push_back(rank.memory);
  }
  for (std::size_t s = 0; s < costs.size(); ++s) {
    const Rank rank = plan.stages[s].rank;
    const auto on_rank = [&](Nanoseconds time) {
      return to_nanoseconds(to_seconds(time) / problem.cluster.ranks[rank.index()].speed);
    };
    const auto message = [&](std::size_t from, Rank to) {
      const Rank source = plan.stages[from].rank;
      if (source == to) return Nanoseconds{0};
      const cost::Link& link = problem.cluster.link(source, to);
      const auto bytes = static_cast<double>(costs[std::min(from, s)].boundary.value);
      return to_nanoseconds(link.latency_s + bytes / link.bandwidth_bytes_per_s);
    };
    ordering.stages.push_back(
        {.forward = on_rank(costs[s].forward),
         .input_gradient = on_rank(costs[s].input_gradient),
         .weight_gradient = on_rank(costs[s].weight_gradient),
         .activation_transfer = s == 0 ? Nanoseconds{0} : message(s - 1, rank),
         .gradient_transfer = s + 1 == costs.size() ? Nanoseconds{0} : message(s + 1, rank),
         .stash = costs[s].activation,
         .restored = std::max(whole[s].activation - costs[s].activation, Bytes{0})});
    ordering.stash_limit[rank.index()] -= costs[s].state;
  }
  return ordering;
}

// Gives an adaptive plan the list scheduler's order for its cut.
Expected<void> add_order(Plan& plan, const BalanceProblem& problem, const LayerSet& again) {
  const schedule::AdaptiveProblem ordering = ordering_problem(plan, problem, again);
  for (std::size_t r = 0; r < ordering.stash_limit.size(); ++r) {
    if (ordering.stash_limit[r] >= Bytes{0}) continue;
    const Bytes has = problem.cluster.ranks[r].memory;
    return make_error(ErrorCode::kInfeasible,
                      "the layers of plan {} on rank {} take {} without a single stash, it has {}: "
                      "give it more memory, or use more ranks",
                      to_string(plan), r, format_bytes(has - ordering.stash_limit[r]),
                      format_bytes(has));
  }
  DYNMO_ASSIGN(schedule::AdaptiveSchedule made, schedule::make_adaptive(ordering));
  plan.order = std::move(made.schedule.ranks);
  return {};
}

// Returns kInfeasible, with the rank and its bytes, if a replayed plan does not fit the memory.
Expected<void> require_memory(const Plan& plan, const Evaluation& evaluation,
                              const cost::Cluster& cluster, Balancer balancer,
                              std::string_view what) {
  std::optional<std::size_t> worst;
  Bytes excess;
  for (std::size_t r = 0; r < cluster.ranks.size(); ++r) {
    const Bytes peak = evaluation.result.ranks[r].peak_memory;
    if (peak <= cluster.ranks[r].memory || peak - cluster.ranks[r].memory <= excess) continue;
    worst = r;
    excess = peak - cluster.ranks[r].memory;
  }
  if (!worst) return {};
  const std::string_view others = balancer == Balancer::kOptimal || balancer == Balancer::kVPair
                                      ? "the search balancer, or "
                                      : "the optimal or search balancer, or ";
  const Bytes has = cluster.ranks[*worst].memory;
  const Bytes peak = evaluation.result.ranks[*worst].peak_memory;
  return make_error(ErrorCode::kInfeasible,
                    "the {} plan {} takes {} bytes ({}) on rank {}, which has {} bytes ({}): give "
                    "it that much, use more ranks, {}a schedule with fewer micro-batches in flight",
                    what, to_string(plan), peak.value, format_bytes(peak), *worst, has.value,
                    format_bytes(has), others);
}

// Returns the balancer's plan under the problem's schedule kind, with the cut for `what`.
Expected<Proposal> of_one_cut(internal::CutFor what, Balancer balancer,
                              const BalanceProblem& problem) {
  DYNMO_ASSIGN(internal::MadeCut made, internal::make_cut(what, balancer, problem));
  Proposal proposal;
  proposal.rounds = made.rounds;
  proposal.rounds_bound = made.rounds_bound;
  proposal.plan = make_plan(made.counts, placement(balancer, problem), problem.cluster.size(),
                            problem.schedule);
  if (problem.schedule == ScheduleKind::kAdaptive) {
    const bool plain = what == internal::CutFor::kPlain;
    const LayerSet again = plain ? LayerSet() : all_layers(problem.model);
    DYNMO_TRY(add_order(proposal.plan, problem, again));
  }
  DYNMO_TRY(judge_again(proposal, problem));
  proposal.winner = fmt::format("{}/{}", schedule::name(problem.schedule), name(balancer));
  DYNMO_TRY(require_memory(proposal.plan, proposal.evaluation, problem.cluster, balancer,
                           proposal.winner));
  return proposal;
}

// Returns whether the balancer's plan without recomputation would be faster with more memory.
bool memory_matters(const Proposal& plain, Balancer balancer, const BalanceProblem& problem) {
  if (!plain.recomputed.empty()) return true;
  const bool knows = balancer == Balancer::kOptimal || balancer == Balancer::kVPair;
  if (!knows && problem.schedule != ScheduleKind::kAdaptive) return false;
  Bytes all;  // more than any order asks of a rank
  for (const cost::LayerCost& layer : problem.model.layers) {
    all += cost::state_bytes(layer) + layer.activation_bytes * problem.micro_batches;
  }
  cost::Cluster roomy = problem.cluster;
  bool plenty = true;
  for (cost::ClusterRank& rank : roomy.ranks) {
    plenty = plenty && all <= rank.memory;
    rank.memory = cost::kUnlimitedMemory;
  }
  if (plenty) return false;
  const BalanceProblem asked{{problem.model, roomy, problem.micro_batches},
                             problem.schedule,
                             problem.stages_per_rank,
                             problem.current};
  const auto free = of_one_cut(internal::CutFor::kPlain, balancer, asked);
  return free && free->evaluation.result.step_time < plain.evaluation.result.step_time;
}

// Returns the balancer's plan under the problem's schedule kind, with the fastest of its cuts.
Expected<Proposal> of_cut(Balancer balancer, const BalanceProblem& problem) {
  std::optional<Proposal> best;
  std::optional<Error> refusal;
  for (const internal::CutFor what : internal::cuts_for(balancer, problem.recompute)) {
    auto proposal = of_one_cut(what, balancer, problem);
    if (!proposal) {
      refusal = proposal.error();  // the last cut recomputes most
      continue;
    }
    const bool first = what == internal::CutFor::kPlain;
    if (first && problem.recompute == Recompute::kAuto &&
        !memory_matters(*proposal, balancer, problem)) {
      return proposal;
    }
    if (!best || proposal->evaluation.result.step_time < best->evaluation.result.step_time) {
      best = std::move(*proposal);
    }
  }
  if (!best) return *refusal;
  return *std::move(best);
}

Expected<void> check_filter(const PlanFilter* accepts, const Plan& plan) {
  return accepts != nullptr ? (*accepts)(plan) : Expected<void>();
}

Expected<Proposal> best_kind(Balancer balancer, const BalanceProblem& problem,
                             const PlanFilter* accepts) {
  std::optional<Proposal> best;
  std::optional<Error> refusal;
  int candidates = 0;
  for (const schedule::KindTraits& kind : schedule::schedule_kinds()) {
    if (balancer == Balancer::kVPair && !takes_v(kind.kind)) continue;
    BalanceProblem one = problem;
    one.schedule = kind.kind;
    auto proposal = of_cut(balancer, one);
    if (proposal) {
      if (auto accepted = check_filter(accepts, proposal->plan); !accepted) {
        proposal = accepted.error();
      }
    }
    if (!proposal) {
      // A refusal about memory tells the user more than one about a shape.
      if (!refusal || refusal->code == ErrorCode::kBadInput) refusal = proposal.error();
      continue;
    }
    ++candidates;
    if (!best || proposal->evaluation.step_time_s < best->evaluation.step_time_s) {
      best = std::move(*proposal);
    }
  }
  if (!best) return *refusal;
  best->candidates = candidates;
  return *std::move(best);
}

Expected<Proposal> by_search(const BalanceProblem& problem, const ProposeOptions& options) {
  SearchOptions effort{.evaluations = options.evaluations,
                       .seed = options.seed,
                       .recompute = problem.recompute,
                       .accepts = options.accepts,
                       .replays_cuts = options.replays_cuts};
  if (options.schedules == ScheduleChoice::kAsGiven) effort.schedule = problem.schedule;
  DYNMO_ASSIGN(SearchResult found, search({problem.costs(), problem.current}, effort));
  Proposal proposal;
  proposal.plan = std::move(found.plan);
  proposal.evaluation = std::move(found.evaluation);
  proposal.recomputed = std::move(found.recomputed);
  proposal.winner = std::move(found.winner);
  proposal.candidates = static_cast<int>(found.candidates.size());
  return proposal;
}

Expected<Proposal> in_given_order(Balancer balancer, const BalanceProblem& problem,
                                  const ProposeOptions& options) {
  if (balancer == Balancer::kSearch) return by_search(problem, options);
  if (options.schedules == ScheduleChoice::kBest)
    return best_kind(balancer, problem, options.accepts);
  return of_cut(balancer, problem);
}

// Plans the ranks sorted by node. Returns the proposal under their names in the cluster.
Expected<Proposal> grouped_by_node(Balancer balancer, const BalanceProblem& problem,
                                   const ProposeOptions& options) {
  const std::vector<Rank> order = node_by_node(problem.cluster);
  if (std::is_sorted(order.begin(), order.end())) {
    return in_given_order(balancer, problem, options);
  }
  cost::Cluster cluster = problem.cluster;
  std::vector<Rank> place(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    cluster.ranks[i] = problem.cluster.ranks[order[i].index()];
    place[order[i].index()] = Rank{static_cast<std::int32_t>(i)};
  }
  std::optional<Plan> current;
  if (problem.current != nullptr) current = renamed(*problem.current, place);
  const BalanceProblem sorted{{problem.model, cluster, problem.micro_batches},
                              problem.schedule,
                              problem.stages_per_rank,
                              current ? &*current : nullptr,
                              problem.recompute};
  DYNMO_ASSIGN(Proposal proposal, in_given_order(balancer, sorted, options));
  proposal.plan = renamed(proposal.plan, order);
  DYNMO_TRY(judge_again(proposal, problem));
  return proposal;
}

// Returns the plan's replay, or nullopt if it does not fit the memory of every rank.
Expected<std::optional<Judged>> fitting(const Plan& plan, const BalanceProblem& problem) {
  DYNMO_ASSIGN(Judged judged, judge(problem.recompute, plan, problem));
  if (!fits_memory(judged.evaluation.result, problem.cluster)) return std::optional<Judged>();
  return std::optional(std::move(judged));
}

// Gives every rank the position that makes the step shortest. If the step is hardly longer when
// most layers stay, they stay.
Expected<void> place_ranks(Proposal& proposal, const BalanceProblem& problem) {
  const cost::ModelCost run = recomputed(problem.model, proposal.recomputed);
  const BalanceProblem as_run{{run, problem.cluster, problem.micro_batches},
                              problem.schedule,
                              problem.stages_per_rank,
                              problem.current};
  DYNMO_ASSIGN(Plan placed, place(proposal.plan, as_run));
  DYNMO_ASSIGN(auto judged, fitting(placed, problem));
  if (!judged) return {};
  if (problem.current != nullptr) {
    cost::Cluster one_node = problem.cluster;
    for (cost::ClusterRank& rank : one_node.ranks) rank.node = 0;
    Plan stay = align(placed, *problem.current, one_node, problem.model);
    DYNMO_ASSIGN(auto unmoved, fitting(stay, problem));
    if (unmoved &&
        judged->evaluation.step_time_s >= (1 - kPlaceGain) * unmoved->evaluation.step_time_s) {
      placed = std::move(stay);
      judged = std::move(unmoved);
    }
  }
  proposal.plan = std::move(placed);
  proposal.evaluation = std::move(judged->evaluation);
  proposal.recomputed = std::move(judged->recomputed);
  return {};
}

}  // namespace

Expected<void> judge_again(Proposal& proposal, const BalanceProblem& problem) {
  DYNMO_ASSIGN(Judged judged, judge(problem.recompute, proposal.plan, problem));
  proposal.evaluation = std::move(judged.evaluation);
  proposal.recomputed = std::move(judged.recomputed);
  return {};
}

void set_generation(Plan& plan, const Plan* current) {
  plan.generation = 0;
  if (current == nullptr) return;
  plan.generation = current->generation + (same_but_generation(plan, *current) ? 0 : 1);
}

RankOrder rank_order_in(const cost::Cluster& cluster, RankOrder order) {
  if (order != RankOrder::kBestOfNodes) return order;
  const bool one_node = std::ranges::all_of(cluster.ranks, [&](const cost::ClusterRank& rank) {
    return rank.node == cluster.ranks.front().node;
  });
  return one_node ? RankOrder::kKeep : RankOrder::kBest;
}

Expected<Proposal> propose(Balancer balancer, const BalanceProblem& problem,
                           const ProposeOptions& options) {
  const RankOrder order = rank_order_in(problem.cluster, options.rank_order);
  const bool places = order == RankOrder::kBest;
  auto proposal = places ? grouped_by_node(balancer, problem, options)
                         : in_given_order(balancer, problem, options);
  if (!proposal) return proposal;
  if (places && place_matters(problem.cluster)) {
    DYNMO_TRY(place_ranks(*proposal, problem));
  } else if (problem.current != nullptr && order != RankOrder::kKeep) {
    proposal->plan = align(proposal->plan, *problem.current, problem.cluster, problem.model);
    DYNMO_TRY(judge_again(*proposal, problem));
  }
  DYNMO_TRY(check_filter(options.accepts, proposal->plan));
  set_generation(proposal->plan, problem.current);
  return proposal;
}

}  // namespace dynmo::plan
