// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/pack.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "dynmo/core/check.h"
#include "dynmo/plan/place.h"

namespace dynmo::plan {
namespace {

constexpr int kMaxExhaustive = 10;

Expected<void> validate(const BalanceProblem& problem, const PackOptions& options) {
  const auto good = [](double value) { return std::isfinite(value) && value >= 0; };
  if (!good(options.slack)) {
    return make_error(ErrorCode::kBadInput, "pack: slack is {}, wanted a number, 0 or more",
                      options.slack);
  }
  if (!good(options.reference_step_s)) {
    return make_error(ErrorCode::kBadInput,
                      "pack: reference_step_s is {}, wanted a number, 0 or more",
                      options.reference_step_s);
  }
  if (options.ranks < 0 || options.ranks > problem.cluster.size()) {
    return make_error(ErrorCode::kBadInput,
                      "pack: onto {} ranks, wanted 1 to the cluster's {}, or 0 for the fewest",
                      options.ranks, problem.cluster.size());
  }
  return cost::validate(problem.cluster);
}

// Returns whether all ranks are alike, so that any of them may be kept.
bool all_equal(const cost::Cluster& cluster) {
  const cost::ClusterRank& first = cluster.ranks.front();
  return std::all_of(cluster.ranks.begin(), cluster.ranks.end(), [&](const auto& rank) {
    return rank.speed == first.speed && rank.memory == first.memory &&
           (rank.node == first.node ||
            (cluster.inside_node == cluster.between_nodes &&
             (!cluster.between_switches || rank.network_switch == first.network_switch)));
  });
}

// Returns sets of `keep` ranks, the preferred ones first.
std::vector<std::vector<Rank>> choices(const cost::Cluster& cluster, int keep) {
  std::vector<std::vector<Rank>> sets = {ranks_to_keep(cluster, keep)};
  const int ranks = cluster.size();
  if (all_equal(cluster) || ranks > kMaxExhaustive) return sets;
  for (unsigned mask = 1; mask < (1U << ranks); ++mask) {  // low ranks kept first
    std::vector<Rank> kept;
    for (int r = 0; r < ranks; ++r) {
      if ((mask >> r & 1U) != 0) kept.emplace_back(r);
    }
    if (static_cast<int>(kept.size()) == keep && kept != sets.front()) {
      sets.push_back(std::move(kept));
    }
  }
  return sets;
}

cost::Cluster part_of(const cost::Cluster& cluster, const std::vector<Rank>& kept) {
  cost::Cluster part = cluster;
  part.ranks.clear();
  for (const Rank rank : kept) part.ranks.push_back(cluster.ranks[rank.index()]);
  return part;
}

// Moves every other rank to a node of its own, so that it does not take a kept rank's position.
cost::Cluster apart_from_others(cost::Cluster cluster, const std::vector<Rank>& kept) {
  int free = 0;
  for (const cost::ClusterRank& rank : cluster.ranks) free = std::max(free, rank.node + 1);
  for (std::int32_t r = 0; r < cluster.size(); ++r) {
    if (std::binary_search(kept.begin(), kept.end(), Rank{r})) continue;
    cluster.ranks[static_cast<std::size_t>(r)].node = free++;
  }
  return cluster;
}

// Returns the plan of `kept` as a plan of the whole cluster.
Plan spread(const Plan& plan, const std::vector<Rank>& kept, int ranks) {
  Plan whole = plan;
  whole.ranks = ranks;
  for (PlanStage& stage : whole.stages) stage.rank = kept[stage.rank.index()];
  if (plan.order.empty()) return whole;
  whole.order.assign(static_cast<std::size_t>(ranks), {});
  for (std::size_t r = 0; r < kept.size(); ++r) whole.order[kept[r].index()] = plan.order[r];
  return whole;
}

class Packer {
 public:
  Packer(Balancer balancer, const BalanceProblem& problem, const PackOptions& options)
      : balancer_(balancer), problem_(problem), options_(options) {
    options_.propose.rank_order = rank_order_in(problem.cluster, options.propose.rank_order);
  }

  // Returns the balancer's plan on the kept ranks alone, as a plan of the whole cluster.
  [[nodiscard]] Expected<Proposal> on(const std::vector<Rank>& kept) const {
    if (static_cast<int>(kept.size()) == problem_.cluster.size()) {
      return propose(balancer_, problem_, options_.propose);
    }
    const cost::Cluster part = part_of(problem_.cluster, kept);
    const BalanceProblem fewer{{problem_.model, part, problem_.micro_batches},
                               problem_.schedule,
                               problem_.stages_per_rank,
                               nullptr,
                               problem_.recompute};
    DYNMO_ASSIGN(Proposal proposal, propose(balancer_, fewer, options_.propose));
    proposal.plan = spread(proposal.plan, kept, problem_.cluster.size());
    if (problem_.current != nullptr && options_.propose.rank_order != RankOrder::kKeep) {
      proposal.plan = align(proposal.plan, *problem_.current,
                            apart_from_others(problem_.cluster, kept), problem_.model);
    }
    set_generation(proposal.plan, problem_.current);
    DYNMO_TRY(judge_again(proposal, problem_));
    return proposal;
  }

  // Returns the first choice of `keep` ranks whose plan stays within `allowed_s`, or nullopt. Then
  // `refusal` has the reason.
  [[nodiscard]] std::optional<Proposal> within(int keep, double allowed_s, Error& refusal) const {
    for (const std::vector<Rank>& kept : choices(problem_.cluster, keep)) {
      if (min_step_s(kept) > allowed_s * (1 + 1e-6) + 1e-6) continue;
      auto proposal = on(kept);
      if (!proposal) {
        refusal = proposal.error();
      } else if (proposal->evaluation.step_time_s <= allowed_s) {
        return *std::move(proposal);
      }
    }
    return std::nullopt;
  }

 private:
  // Returns the step time in perfect balance. A replay may be shorter because it rounds to
  // nanoseconds.
  [[nodiscard]] double min_step_s(const std::vector<Rank>& kept) const {
    double work = 0;
    for (const double layer : cost::layer_work_s(problem_.model, problem_.micro_batches)) {
      work += layer;
    }
    double speed = 0;
    for (const Rank rank : kept) speed += problem_.cluster.ranks[rank.index()].speed;
    return problem_.micro_batches * work / speed;
  }

  Balancer balancer_;
  const BalanceProblem& problem_;
  PackOptions options_;
};

Packing packing_of(Proposal proposal, double reference_s) {
  Packing packing{.proposal = std::move(proposal), .released = {}, .reference_step_s = reference_s};
  const std::vector<Rank> used = ranks_at_work(packing.proposal.plan);
  for (std::int32_t r = 0; r < packing.proposal.plan.ranks; ++r) {
    if (!std::binary_search(used.begin(), used.end(), Rank{r})) packing.released.emplace_back(r);
  }
  return packing;
}

}  // namespace

std::vector<Rank> ranks_to_keep(const cost::Cluster& cluster, int keep) {
  DYNMO_CHECK(keep >= 1 && keep <= cluster.size(), "1 to {} ranks to keep, got {}", cluster.size(),
              keep);
  std::map<double, std::vector<Rank>> by_speed;  // slowest first
  std::map<int, std::size_t> node_size;
  for (std::int32_t r = 0; r < cluster.size(); ++r) {
    const cost::ClusterRank& rank = cluster.ranks[static_cast<std::size_t>(r)];
    by_speed[rank.speed].emplace_back(r);
    ++node_size[rank.node];
  }
  const auto node_of = [&](Rank rank) { return cluster.ranks[rank.index()].node; };
  std::set<Rank> emptied;
  auto left = static_cast<std::size_t>(cluster.size() - keep);
  for (const auto& [speed, ranks] : by_speed) {
    const auto empty = [&](Rank rank) {
      if (!emptied.insert(rank).second) return;
      --left;
      --node_size[node_of(rank)];
    };
    // Whole nodes come first. The lowest rank's node is the last of them, because that rank leads.
    for (auto rank = ranks.rbegin(); rank != ranks.rend(); ++rank) {
      const int node = node_of(*rank);
      if (std::any_of(std::next(rank), ranks.rend(), [&](Rank r) { return node_of(r) == node; })) {
        continue;
      }
      const auto here =
          static_cast<std::size_t>(std::count_if(ranks.begin(), ranks.end(), [&](Rank other) {
            return node_of(other) == node && emptied.count(other) == 0;
          }));
      if (here == 0 || here != node_size[node] || here > left) continue;
      for (const Rank other : ranks) {
        if (node_of(other) == node) empty(other);
      }
    }
    for (auto rank = ranks.rbegin(); rank != ranks.rend() && left > 0; ++rank) empty(*rank);
  }
  std::vector<Rank> kept;
  for (std::int32_t r = 0; r < cluster.size(); ++r) {
    if (emptied.count(Rank{r}) == 0) kept.emplace_back(r);
  }
  return kept;
}

Expected<Proposal> propose_on(const std::vector<Rank>& kept, Balancer balancer,
                              const BalanceProblem& problem, const ProposeOptions& options) {
  DYNMO_CHECK(!kept.empty(), "a rank to keep");
  const PackOptions how{.propose = options};
  return Packer(balancer, problem, how).on(kept);
}

std::vector<Rank> ranks_at_work(const Plan& plan) {
  std::set<Rank> ranks;
  for (const PlanStage& stage : plan.stages) ranks.insert(stage.rank);
  return {ranks.begin(), ranks.end()};
}

Plan without_others(const Plan& plan, const std::vector<Rank>& kept) {
  Plan part = plan;
  part.ranks = static_cast<int>(kept.size());
  part.order.clear();
  std::map<Rank, Rank> place;
  for (std::size_t i = 0; i < kept.size(); ++i) place[kept[i]] = Rank(static_cast<int>(i));
  for (PlanStage& stage : part.stages) {
    DYNMO_CHECK(place.count(stage.rank) > 0, "layers on kept ranks, got some on rank {}",
                stage.rank);
    stage.rank = place.at(stage.rank);
  }
  if (plan.order.empty()) return part;
  for (const Rank rank : kept) part.order.push_back(plan.order[rank.index()]);
  return part;
}

Plan with_more_ranks(Plan plan, int ranks) {
  DYNMO_CHECK(ranks >= plan.ranks, "at least {} ranks, got {}", plan.ranks, ranks);
  plan.ranks = ranks;
  if (!plan.order.empty()) plan.order.resize(static_cast<std::size_t>(ranks));
  return plan;
}

Expected<Packing> pack(Balancer balancer, const BalanceProblem& problem,
                       const PackOptions& options) {
  DYNMO_TRY(validate(problem, options));
  DYNMO_TRY(cost::validate(problem.model, problem.micro_batches));
  const Packer packer(balancer, problem, options);
  Error refusal{ErrorCode::kInfeasible, "no plan fits: give the ranks more memory"};
  const double any = std::numeric_limits<double>::infinity();
  if (options.ranks > 0) {
    auto proposal = packer.within(options.ranks, any, refusal);
    if (!proposal) return refusal;
    return packing_of(*std::move(proposal), options.reference_step_s);
  }
  double reference_s = options.reference_step_s;
  std::optional<Proposal> on_all;
  if (reference_s == 0) {
    DYNMO_ASSIGN(on_all, packer.on(ranks_to_keep(problem.cluster, problem.cluster.size())));
    reference_s = on_all->evaluation.step_time_s;
  }
  const double allowed_s = reference_s * (1 + options.slack);
  for (int keep = 1; keep < problem.cluster.size(); ++keep) {
    auto proposal = packer.within(keep, allowed_s, refusal);
    if (proposal) return packing_of(*std::move(proposal), reference_s);
  }
  if (!on_all) {
    DYNMO_ASSIGN(on_all, packer.on(ranks_to_keep(problem.cluster, problem.cluster.size())));
  }
  return packing_of(*std::move(on_all), reference_s);
}

}  // namespace dynmo::plan
