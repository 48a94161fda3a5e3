// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replays one step of a lowered schedule against per-stage costs: discrete events in integer
// nanoseconds, with the engine's rules (receives posted as the schedule says, a transfer starts
// when both ends are posted, sends waited for lazily). Pure and deterministic; the planner scores
// candidates with it.

#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/schedule/schedule.h"
#include "dynmo/schedule/timeline.h"

namespace dynmo::sim {

// Costs of one stage on a rank of speed 1; times of one micro-batch. B takes input_gradient +
// weight_gradient.
struct StageCost {
  Nanoseconds forward{0};
  Nanoseconds input_gradient{0};
  Nanoseconds weight_gradient{0};
  Nanoseconds update{0};  // once a step, after the rank's last action
  Bytes state;            // parameters, gradients, optimizer
  Bytes activation;  // stash of a micro-batch, from the start of F to the end of W (0 for a frozen
                     // stage)
  Bytes boundary;    // message to the next stage, and the gradient back
};

struct SimOptions {
  bool timeline = false;  // record SimResult::timeline
};

struct RankUsage {
  Nanoseconds busy{0};    // compute and update
  Nanoseconds idle{0};    // step_time - busy
  Bytes peak_activation;  // largest sum of stashes
  Bytes peak_memory;      // state + peak_activation
};

struct SimResult {
  Nanoseconds step_time{0};
  std::vector<RankUsage> ranks;
  double bubble = 0;  // idle time of all ranks / (ranks x step time)
  schedule::Timeline timeline;
};

// Requires one cost a stage and one cluster rank a schedule rank. kBadInput for negative costs, a
// schedule that is not lowered, or one that cannot complete (named as the checker names it).
[[nodiscard]] Expected<SimResult> simulate(const schedule::Schedule& lowered,
                                           std::span<const StageCost> stages,
                                           const cost::Cluster& cluster, SimOptions options = {});

}  // namespace dynmo::sim
