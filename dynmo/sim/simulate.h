// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replays one step of a lowered schedule against per-stage costs, in integer nanoseconds and with
// the engine's rules: receives posted as the schedule says, a transfer starts when both ends are
// posted, sends waited for at the end (docs/simulator.md). Pure and deterministic; the planner
// scores candidates with it. Time and memory are linear in the number of actions.

#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/schedule/schedule.h"
#include "dynmo/schedule/timeline.h"

namespace dynmo::sim {

// Costs of one stage on a rank of speed 1; times of one micro-batch. A rank of speed v takes each
// time / v, rounded to the nearest nanosecond; B takes I + W.
struct StageCost {
  Nanoseconds forward{0};
  Nanoseconds input_gradient{0};
  Nanoseconds weight_gradient{0};
  // Once a step, after the last action and send of all ranks: the global gradient norm that clips
  // it needs every gradient. 0 if frozen.
  Nanoseconds update{0};
  Bytes state;       // parameters, gradients, optimizer
  Bytes activation;  // stash of a micro-batch, from the start of F to the end of W (0 for a frozen
                     // stage)
  Bytes boundary;    // message to the next stage, and the gradient back
};

struct SimOptions {
  // Record SimResult::timeline: compute actions from start to end; a send and its receive, each on
  // its own rank, from the moment both are posted to the arrival.
  bool timeline = false;
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

// kBadInput: a schedule that the checker refuses (with its message: what is wrong, or which actions
// wait for each other); not one cost a stage and one cluster rank a schedule rank; costs or links
// that are negative or no numbers, a speed that is not positive; sums of 2^62 ns or bytes and more.
[[nodiscard]] Expected<SimResult> simulate(const schedule::Schedule& lowered,
                                           std::span<const StageCost> stages,
                                           const cost::Cluster& cluster, SimOptions options = {});

}  // namespace dynmo::sim
