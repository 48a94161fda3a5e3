// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rank takes which position of a plan. The ranks of a job may come in any order, so that
// neighbours of a pipeline lie on different nodes although they need not; a plan under other names
// of its ranks does the same work with fewer messages on slow links.

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/traffic.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/plan.h"

namespace dynmo::plan {

inline constexpr int kMaxOrdered = 8;  // ranks of which place() tries all orders

// `plan` with its ranks permuted so that its replayed step is shortest; of equally short ones that
// which moves the fewest bytes from `problem.current`, then the given order. A step never becomes
// longer, nor does a plan that fits the memory of every rank become one that does not.
//
// Up to kMaxOrdered ranks: exact over all orders, unless more than `max_replays` of them differ and
// no bound rules them out. With more ranks, those of equal speed and memory exchange places so that
// message_time_s() falls: nodes as blocks along the pipeline, then exchanges of two ranks while
// they help; at most two replays. Deterministic.
//
// kBadInput as `evaluate`. Requires a plan for the ranks of `problem.cluster`.
[[nodiscard]] Expected<Plan> place(const Plan& plan, const BalanceProblem& problem,
                                   std::int64_t max_replays = 50000);

// Duration of these messages if each had its link to itself and no other were under way.
[[nodiscard]] double message_time_s(const TrafficRows& rows, const cost::Cluster& cluster);

// All ranks, those of a node together and nodes of a switch: both by their first rank, the ranks of
// a node ascending.
[[nodiscard]] std::vector<Rank> node_by_node(const cost::Cluster& cluster);

// Whether two ranks of a cluster can differ in anything that a step's duration depends on.
[[nodiscard]] bool place_matters(const cost::Cluster& cluster);

}  // namespace dynmo::plan
