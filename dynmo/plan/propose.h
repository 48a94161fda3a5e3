// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes a new plan: cut by a balancer's name, placed and scheduled by options, and evaluated by
// replay. `dynmo plan`, scenarios, packing and the policy all use it.

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
  kBest,     // "auto": least step time of all kinds that the balancer supports
};

enum class RankOrder {
  kKeep,  // as the balancer places
  // Equal ranks may be exchanged, so that fewest bytes move from the current plan (align).
  kPermuteEqual,
  // The balancer gets the ranks of each node together. Its plan is placed (place.h), so that the
  // step is shortest. With a current plan, equally fast ranks stay where the fewest bytes move,
  // unless the step becomes shorter by kPlaceGain. So positions do not change by noise.
  kBest,
  kBestOfNodes,  // kBest if the cluster has several nodes, else kKeep
};
// Replaces kBestOfNodes by its meaning in this cluster.
[[nodiscard]] RankOrder rank_order_in(const cost::Cluster& cluster, RankOrder order);
inline constexpr double kPlaceGain = 0.01;

struct ProposeOptions {
  ScheduleChoice schedules = ScheduleChoice::kAsGiven;
  RankOrder rank_order = RankOrder::kKeep;
  // kSearch only. It is a fixed number, not a time, so that every rank finds the same plan
  // (search.h).
  std::int64_t evaluations = SearchOptions{}.evaluations;
  std::uint64_t seed = SearchOptions{}.seed;
  const PlanFilter* accepts = nullptr;  // none: every plan
  bool replays_cuts = false;            // kSearch only, as in SearchOptions
};

struct Proposal {
  // Its generation is the current plan's if the plans are equal, else the next one. It is 0 without
  // a current plan.
  Plan plan;
  Evaluation evaluation;     // its replay on the problem's cluster, recomputation included
  LayerSet recomputed = {};  // recomputed_layers() of the plan
  std::string winner;        // name of the candidate, "zb-v/v-pair"
  int candidates = 1;        // number of evaluated plans
  int rounds = 0;            // diffusion: its rounds, and the paper's bound on them
  double rounds_bound = 0;
};

// Proposes a plan. The schedule kind determines the placement. gpipe, 1f1b and zb-h1 have one stage
// a rank. A rank of interleaved has the problem's stages_per_rank in a loop. A rank of zb-v has two
// stages, placed as a V. (kVPair balances ranks, the other balancers its 2P stages.) For adaptive,
// the order is made for the cut by list scheduling, or found by search.
//
// With recomputation (BalanceProblem) a plan fits if it fits with its recomputed layers. With kAuto
// nothing is recomputed if memory does not change the balancer's plan. Else the result is the
// fastest of several cuts. One is balanced without recomputation, one with all layers recomputed.
// Balancers that use memory add one with least recomputation. So it is no slower than with kNone,
// nor, with one stage a rank, than with kWhole.
//
// Returns kBadInput as balance() and make_schedule() do. Returns kInfeasible if no plan of the
// balancer fits the memory of every rank in its replay. Such a plan is never returned. The message
// has the rank, and the memory that the plan needs there and that it has. Returns the filter's own
// error if it accepts no plan.
[[nodiscard]] Expected<Proposal> propose(Balancer balancer, const BalanceProblem& problem,
                                         const ProposeOptions& options = {});

// Replays the proposal's changed plan with its recomputed_layers(). Returns the errors of judge().
[[nodiscard]] Expected<void> judge_again(Proposal& proposal, const BalanceProblem& problem);

// Sets the generation: 0 without a current plan, the current plan's if `plan` is otherwise equal,
// else the next one.
void set_generation(Plan& plan, const Plan* current);

}  // namespace dynmo::plan
