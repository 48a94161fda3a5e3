// SPDX-License-Identifier: Apache-2.0
#pragma once

// Contiguous cuts of a model into the stages of a schedule kind, placed on the ranks of a cluster
// in the cluster's order, every stage at least one layer. What a cut is worth, a replay says:
// propose.h is the entry point for all who want a plan.

#include <span>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan {

enum class Balancer {
  kUniform,              // equal numbers of layers, the first stages one more
  kBlocks,               // equal numbers of whole blocks, ends with the ends: Megatron's cut
  kParameters,           // min-max of parameter bytes
  kTime,                 // min-max of time, blind to memory and speed
  kDiffusionParameters,  // neighbours exchange boundary layers: parameter bytes (diffusion.h)
  kDiffusionTime,        // the same for time; blind to memory and speed
  kOptimal,              // exact min-max of time / speed under every rank's memory
  kVPair,   // exact min-max of the two stages a rank holds in V placement (v_pair_impl.h)
  kSearch,  // cut, placement and order together (search.h): only propose() can
};
// All of them, in the order in which a search tries them.
[[nodiscard]] std::span<const Balancer> balancers();
[[nodiscard]] std::string_view name(Balancer balancer);
[[nodiscard]] Expected<Balancer> parse_balancer(std::string_view name);

struct BalanceProblem {
  const cost::ModelCost& model;  // without recomputation
  const cost::Cluster& cluster;
  int micro_batches = 1;
  schedule::ScheduleKind schedule =
      schedule::ScheduleKind::k1F1B;  // decides placement and in-flight micro-batches
  int stages_per_rank = 2;            // kInterleaved; the other kinds have a number of their own
  const Plan* current = nullptr;      // diffusion starts from it, search keeps it as a candidate
  Recompute recompute = Recompute::kNone;
};

// Whether the kind runs two stages a rank in V placement, which kVPair cuts for.
[[nodiscard]] bool takes_v(schedule::ScheduleKind kind);

// Rank of each stage: loop_placement for kInterleaved, the V for kZbV (and for kVPair with
// kAdaptive), one stage a rank otherwise.
[[nodiscard]] std::vector<Rank> placement(Balancer balancer, const BalanceProblem& problem);

// Returns, for each stage of `placement`, the micro-batches whose stash the balancers assume it to
// hold at once: M for GPipe; min(M, S - s) for 1F1B (and an order not yet made); min(M, P) for
// ZB-H1; for ZB-V min(M, P) on both stages of a rank, which is exact in sum where the two are alike
// (up to 2P-1-r there and r+1 back: docs/planner.md); for interleaved 1F1B counted from its order.
// kBadInput where no such interleaved schedule exists.
[[nodiscard]] Expected<std::vector<int>> in_flight(schedule::ScheduleKind schedule,
                                                   const std::vector<Rank>& placement, int ranks,
                                                   int micro_batches);

// Layers a stage. kTime, kParameters and kOptimal are exact for one stage a rank; among cuts with
// the same bottleneck they take the one with the least sum of squared stage times, and among those
// the leftmost (lexicographically least counts). All comparisons are of integers: times in parts of
// the heaviest layer, speeds in parts of the fastest (chain_impl.h), so that every machine finds
// the same cut, in any unit of time. With several stages a rank they level stages, not ranks, and
// kOptimal gives each stage its rank's whole memory, or, if a rank's sum then overflows, an equal
// share of it.
//
// With recomputation kOptimal and kVPair count it: a stage's time is its work and the least
// recomputation with which it fits (kAuto), or that of all layers (kWhole). kOptimal is exact for
// one stage a rank; with several it gives each an equal share of the memory. kVPair takes layers
// as divisible there. The other balancers cut as if nothing was recomputed.
//
// kBlocks reads blocks from the names of layers ("blocks.0.attention"): whatever stands before the
// first goes with it, and what stands behind a block goes with that block.
//
// kBadInput, naming layer or rank and field: no layers, more stages than layers, costs or speeds
// not finite or negative, fewer blocks than stages (kBlocks), kVPair without V placement, kSearch.
// kInfeasible (kOptimal, kVPair): no cut fits the memory; says how much more on which rank would
// do.
[[nodiscard]] Expected<std::vector<int>> balance(Balancer balancer, const BalanceProblem& problem);

}  // namespace dynmo::plan
