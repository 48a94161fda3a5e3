// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes a cut's replayed step shorter. A balancer balances work, but a step depends on more than
// its slowest rank. In 1F1B few micro-batches wait before the last ranks, so uneven neighbours
// delay each other. Ranks of equal work may give steps that differ by some percent.

#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/plan/balance.h"

namespace dynmo::plan {

struct Refined {
  std::vector<int> counts;   // layers of each rank; empty: no start fits the memory
  std::int64_t replays = 0;  // replayed cuts, with the starts
};

// Returns whether refine() supports the kind: one stage a rank, in an order that follows from the
// kind.
[[nodiscard]] bool refines(schedule::ScheduleKind kind);

// Improves each start of one stage a rank, in turn. In a move one rank gives one layer to another,
// and those between pass on one each. Moves are made while the replayed step becomes shorter and
// fits the memory. The result is a local optimum, the best of all starts, ties to the first.
//
// Cuts whose lower bound (fill, own work, drain) is no better are not replayed. On large problems
// it stops early after a fixed number of replayed actions, not a time, and only near ranks exchange
// layers. So a refinement takes some hundred milliseconds at most, and every rank finds the same.
// Returns kBadInput as evaluate().
[[nodiscard]] Expected<Refined> refine(std::span<const std::vector<int>> starts,
                                       const BalanceProblem& problem);

// Returns the best cut that refinement finds from three starts, or `cut` if none fits the memory.
// The starts are `cut`, the even cut, and the current plan's cut if it has one stage a rank. A
// local optimum is near one of them. Returns the errors of refine() and balance().
[[nodiscard]] Expected<std::vector<int>> refined(const std::vector<int>& cut,
                                                 const BalanceProblem& problem);

}  // namespace dynmo::plan
