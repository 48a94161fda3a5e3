// SPDX-License-Identifier: Apache-2.0
#pragma once

// Contiguous cuts of a model into the stages of a schedule kind. They are placed on the ranks of a
// cluster in its order, with at least one layer in every stage. A replay evaluates a cut: for a
// plan, call propose() (propose.h).

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
  kTime,                 // min-max of time, without memory and speed
  kDiffusionParameters,  // neighbours exchange boundary layers: parameter bytes (diffusion.h)
  kDiffusionTime,        // the same for time, without memory and speed
  kOptimal,              // exact min-max of time / speed under every rank's memory
  // Exact min-max of the two stages that a rank has in V placement (v_pair_impl.h).
  kVPair,
  kSearch,  // cut, placement and order together (search.h): only by propose()
};
// Returns all balancers, in the order in which a search tries them.
[[nodiscard]] std::span<const Balancer> balancers();
[[nodiscard]] std::string_view name(Balancer balancer);
[[nodiscard]] Expected<Balancer> parse_balancer(std::string_view name);

// The model's costs are without recomputation.
struct BalanceProblem : Costs {
  // Determines placement and in-flight micro-batches.
  schedule::ScheduleKind schedule = schedule::ScheduleKind::k1F1B;
  int stages_per_rank = 2;        // kInterleaved; other kinds have fixed numbers
  const Plan* current = nullptr;  // diffusion starts from it, search keeps it as a candidate
  Recompute recompute = Recompute::kNone;
};

// Returns whether the kind runs two stages a rank in V placement, which kVPair needs.
[[nodiscard]] bool takes_v(schedule::ScheduleKind kind);

// Returns the rank of each stage. It is loop_placement for kInterleaved, and the V for kZbV (and
// for kVPair with kAdaptive). Otherwise each rank has one stage.
[[nodiscard]] std::vector<Rank> placement(Balancer balancer, const BalanceProblem& problem);

// Returns, for each stage of `placement`, the stashes that balancers assume it to hold at once:
// - GPipe: M.
// - 1F1B (and an order not yet made): min(M, S - s).
// - ZB-H1: min(M, P).
// - ZB-V: min(M, P) on both stages of a rank. The sum is exact if the two are equal (up to 2P-1-r
//   on the first, r+1 on the second: docs/planner.md).
// - Interleaved 1F1B: counted from its order. Returns kBadInput if no such schedule exists.
[[nodiscard]] Expected<std::vector<int>> in_flight(schedule::ScheduleKind schedule,
                                                   const std::vector<Rank>& placement, int ranks,
                                                   int micro_batches);

// Returns the number of layers of each stage. kTime, kParameters and kOptimal are exact for one
// stage a rank. Among cuts with the same bottleneck they choose the least sum of squared stage
// times. A further tie goes to the leftmost (lexicographically least counts). All comparisons are
// of integers: times in parts of the heaviest layer, speeds in parts of the fastest (chain_impl.h).
// So every machine finds the same cut, in any unit of time. With several stages a rank they balance
// stages, not ranks. kOptimal then gives each stage its rank's whole memory. If a rank's sum
// overflows, it gives each an equal share.
//
// kOptimal and kVPair include recomputation. A stage's time is its work and its recomputation. That
// is the least with which it fits (kAuto), or that of all layers (kWhole). With one stage a rank,
// kOptimal is exact. With several it gives each an equal share of the memory. For recomputation
// kVPair treats layers as divisible. The other balancers cut as if nothing was recomputed.
//
// kBlocks reads blocks from the names of layers ("blocks.0.attention"). Layers before the first
// block belong to it, and layers behind a block belong to that block.
//
// Returns kBadInput with layer or rank and field for no layers, and for negative or infinite costs
// or speeds. Other causes are fewer layers than stages, fewer blocks than stages (kBlocks), kVPair
// without V placement, and kSearch. Returns kInfeasible (kOptimal, kVPair) if no cut fits the
// memory, with the missing bytes and their rank.
[[nodiscard]] Expected<std::vector<int>> balance(Balancer balancer, const BalanceProblem& problem);

}  // namespace dynmo::plan
