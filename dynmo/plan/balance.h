// SPDX-License-Identifier: Apache-2.0
#pragma once

// Contiguous cuts of a model over the ranks of a cluster, in the cluster's order, every rank at
// least one layer.

#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan {

enum class Balancer {
  kUniform,     // equal numbers of layers, the first ranks one more
  kParameters,  // min-max of parameter bytes
  kTime,        // min-max of time, blind to memory and speed
  kOptimal,     // exact min-max of time / speed under every rank's memory
};
[[nodiscard]] std::string_view name(Balancer balancer);
[[nodiscard]] Expected<Balancer> parse_balancer(std::string_view name);

struct BalanceProblem {
  const cost::ModelCost& model;
  const cost::Cluster& cluster;
  int micro_batches = 1;
  schedule::ScheduleKind schedule =
      schedule::ScheduleKind::k1F1B;  // decides the in-flight micro-batches
};

// Micro-batches whose stash stage `stage` of `stages` holds at once: min(M, stages - stage) for
// 1F1B, M for GPipe (docs/planner.md).
[[nodiscard]] int in_flight(schedule::ScheduleKind schedule, int stage, int stages,
                            int micro_batches);

// Layers a rank, in the cluster's order. kTime, kParameters and kOptimal are exact; among cuts with
// the same bottleneck they take the one with the least sum of squared rank times, and among those
// the leftmost (lexicographically least counts). All comparisons are of integers: times in parts of
// the heaviest layer, speeds in parts of the fastest (chain_impl.h), so that every machine finds
// the same cut, in any unit of time.
//
// kBadInput, naming layer or rank and field: no layers, more ranks than layers, costs or speeds not
// finite or negative. kInfeasible (kOptimal only): no cut fits the memory; says how much more on
// which rank would do.
[[nodiscard]] Expected<std::vector<int>> balance(Balancer balancer, const BalanceProblem& problem);

}  // namespace dynmo::plan
