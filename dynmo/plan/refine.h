// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes a cut's replayed step shorter. A balancer levels work, but a step is more than its slowest
// rank: 1F1B lets few micro-batches wait in front of the last ranks, so that uneven neighbours hold
// each other up, and ranks of equal work may give steps that differ by some percent.

#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/plan/balance.h"

namespace dynmo::plan {

struct Refined {
  std::vector<int> counts;   // layers a rank; empty: no start fits the memory
  std::int64_t replays = 0;  // cuts replayed, starts included
};

// Whether refine() can: one stage a rank, in an order that follows from the kind.
[[nodiscard]] bool refines(schedule::ScheduleKind kind);

// From each start of one stage a rank, in turn: one rank gives one layer to another, those between
// pass on one each, as long as that makes the replayed step shorter and it fits the memory. A local
// optimum of these moves; the best of all starts, ties to the first. Cuts whose lower bound (fill,
// own work, drain) is no better are not replayed. A fixed number of replayed actions, not a time,
// ends it early on large problems: a plan takes some tens of milliseconds at most, and every rank
// finds the same. kBadInput as `evaluate` says.
[[nodiscard]] Expected<Refined> refine(std::span<const std::vector<int>> starts,
                                       const BalanceProblem& problem);

// Refines `cut`, the even one and that of the problem's current plan, where it has one stage a
// rank: a local optimum is near one of them. `cut` itself where none fits the memory.
[[nodiscard]] Expected<std::vector<int>> refined(const std::vector<int>& cut,
                                                 const BalanceProblem& problem);

}  // namespace dynmo::plan
