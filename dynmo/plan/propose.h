// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one entry point for a new plan: cut by a balancer's name, placed and scheduled as asked, and
// judged by replay. `dynmo plan`, scenarios, packing and the policy all use it.

#include <cstdint>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/search.h"

namespace dynmo::plan {

enum class ScheduleChoice {
  kAsGiven,  // the problem's schedule kind
  kBest,     // "auto": of all kinds that the balancer can cut for, the least step time
};

enum class RankOrder {
  kKeep,          // as the balancer places
  kPermuteEqual,  // equal ranks may swap, so that fewest bytes move from the current plan (align)
  // The balancer sees the ranks of each node together, and its plan is placed (place.h), so that
  // the step is shortest. Where there is a current plan, equally fast ranks stay where the fewest
  // bytes move unless the step becomes shorter by kPlaceGain: places do not change by noise.
  kBest,
  kBestOfNodes,  // kBest where the cluster has several nodes, else kKeep
};
// The one that stands for the other in this cluster.
[[nodiscard]] RankOrder rank_order_in(const cost::Cluster& cluster, RankOrder order);
inline constexpr double kPlaceGain = 0.01;

struct ProposeOptions {
  ScheduleChoice schedules = ScheduleChoice::kAsGiven;
  RankOrder rank_order = RankOrder::kKeep;
  // kSearch only; a fixed number, not a time, so that every rank finds the same plan (search.h).
  std::int64_t evaluations = SearchOptions{}.evaluations;
  std::uint64_t seed = SearchOptions{}.seed;
  const PlanFilter* accepts = nullptr;  // none: every plan
};

struct Proposal {
  // Generation: the current plan's if it is that very plan, its successor otherwise; 0 without one.
  Plan plan;
  Evaluation evaluation;     // its replay on the problem's cluster, recomputation included
  LayerSet recomputed = {};  // recomputed_layers() of the plan
  std::string winner;        // of all candidates, "zb-v/v-pair"
  int candidates = 1;        // plans judged
  int rounds = 0;            // diffusion only: its rounds, and the paper's bound on them
  double rounds_bound = 0;
};

// The schedule kind decides the placement: gpipe, 1f1b and zb-h1 one stage a rank; interleaved the
// problem's stages_per_rank in a loop; zb-v the V (kVPair levels ranks, the other balancers its 2P
// stages); adaptive: the order is made for the cut by list scheduling, or found by search.
//
// With recomputation (BalanceProblem) a plan fits if it does with its set. kAuto: nothing is
// recomputed where memory does not change the balancer's plan. Else it is the fastest of the cuts
// for layers as they are, for layers that are all recomputed, and, of balancers that know memory,
// for least sets; so it is no slower than with kNone, nor, with one stage a rank, with kWhole.
//
// kBadInput as `balance` and `make_schedule` say. kInfeasible: no cut or no plan of the balancer
// fits the memory of every rank in its replay; such a plan is never returned, and the message names
// the rank, what the plan would take there and what it has. The filter's own error: it takes no
// plan.
[[nodiscard]] Expected<Proposal> propose(Balancer balancer, const BalanceProblem& problem,
                                         const ProposeOptions& options = {});

// Replays the proposal's plan, which has been changed, with its recomputed_layers().
[[nodiscard]] Expected<void> judge_again(Proposal& proposal, const BalanceProblem& problem);

// Generation 0 without a current plan, else the current plan's if `plan` is otherwise that very
// plan, its successor if not.
void set_generation(Plan& plan, const Plan* current);

}  // namespace dynmo::plan
