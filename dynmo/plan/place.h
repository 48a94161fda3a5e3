// SPDX-License-Identifier: Apache-2.0
#pragma once

// Assigns ranks to the positions of a plan. The ranks of a job may come in any order. So neighbours
// of a pipeline may be on different nodes without need. A plan with exchanged ranks does the same
// work with fewer messages on slow links.

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/traffic.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/plan.h"

namespace dynmo::plan {

inline constexpr int kMaxOrdered = 8;  // maximum ranks for which place() tries all orders

// Returns `plan` with its ranks permuted so that its replayed step is shortest. On a tie, the order
// with the fewest bytes to move from `problem.current` wins, then the given order. A step never
// becomes longer. A plan that fits the memory of every rank still fits.
//
// Up to kMaxOrdered ranks it is exact over all orders. Exceptions are more than `max_replays`
// different orders that no bound excludes. With more ranks, those of equal speed and memory
// exchange positions so that message_time_s() falls. First nodes become blocks along the pipeline,
// then pairs of ranks are exchanged while they help. This takes at most two replays. Deterministic.
//
// Returns kBadInput as evaluate(). Requires a plan for the ranks of `problem.cluster`.
[[nodiscard]] Expected<Plan> place(const Plan& plan, const BalanceProblem& problem,
                                   std::int64_t max_replays = 50000);

// Returns the time of the messages, sent one after another.
[[nodiscard]] double message_time_s(const TrafficRows& rows, const cost::Cluster& cluster);

// Returns all ranks, grouped by node, and nodes by switch. Both are in the order of their first
// rank, and the ranks of a node ascend.
[[nodiscard]] std::vector<Rank> node_by_node(const cost::Cluster& cluster);

// Returns whether two ranks of a cluster can differ in a property that affects a step's duration.
[[nodiscard]] bool place_matters(const cost::Cluster& cluster);

// Returns `plan` with equal ranks (same speed, memory and node) permuted to minimize the bytes
// moved from `from`. On a tie, most ranks keep their names. Only ranks of one node are exchanged,
// so every message keeps its link, and the step time stays. An adaptive order is moved with its
// rank.
//
// Exact (an assignment problem, O(n^3) for n equal ranks) up to 512 equal ranks. Beyond, it is
// greedy: the pair that keeps most bytes first. Requires two valid plans over the layers of `model`
// and the ranks of `cluster`.
[[nodiscard]] Plan align(const Plan& plan, const Plan& from, const cost::Cluster& cluster,
                         const cost::ModelCost& model);

}  // namespace dynmo::plan
