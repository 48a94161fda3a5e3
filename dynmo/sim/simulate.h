// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replays one step of a lowered schedule against the costs of its stages. Times are integer
// nanoseconds, and the rules are the engine's. Receives are posted as the schedule says. A transfer
// starts when both ends are posted. Sends are waited for at the end (docs/simulator.md).
//
// Pure and deterministic. The planner scores candidates with it. Time and memory are linear in the
// number of actions. If messages queue for a node's network card, each also costs the logarithm of
// the number of messages under way.

#include <span>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::sim {

// Costs of one stage on a rank of speed 1. Times are those of one micro-batch. A rank of speed v
// takes each time / v, rounded to the nearest nanosecond. B takes I + W.
struct StageCost {
  Nanoseconds forward{0};
  Nanoseconds input_gradient{0};
  Nanoseconds weight_gradient{0};
  // Runs once a step, after the last action, send and reduction of all ranks. It must wait, because
  // the global gradient norm that clips the update needs every gradient. 0 if frozen.
  Nanoseconds update{0};
  // Runs once a step, from the end of the stage's last W (or B). It sums the stage's gradients over
  // the replicas of a data-parallel job (all_reduce_time). It runs beside compute, independent of
  // the rank's speed. The stages of a rank are reduced in turn. 0 if frozen.
  Nanoseconds reduction{0};
  Bytes state = {};  // parameters, gradients, optimizer
  // Stash of a micro-batch, from the start of F to the end of W. 0 if frozen.
  Bytes activation = {};
  Bytes boundary = {};  // message to the next stage, and the gradient back
};

struct SimOptions {
  // Records SimResult::timeline. Compute actions last from start to end. A send and its receive,
  // each on its own rank, last from the moment when both are posted to the arrival.
  bool timeline = false;
  bool memory = false;  // records SimResult::memory
};

// The reasons why a rank is idle. The parts are 0 or more and add up to its idle time exactly. T is
// the step time. T0 is the step time of the same lists if messages and reductions were free and
// immediate.
struct IdleSplit {
  Nanoseconds fill_drain{0};  // T0 - busy time of the busiest rank
  // The rank has less work than the rank with the most. A better cut would help.
  Nanoseconds imbalance{0};
  Nanoseconds communication{0};  // exposed: T - T0
  // The rank waits for a slower one, although the work is even.
  Nanoseconds straggler{0};
};

// The sums of IdleSplit over all ranks, as fractions of ranks x step time. The parts add up to the
// bubble.
struct BubbleSplit {
  double fill_drain = 0;
  double imbalance = 0;
  double communication = 0;
  double straggler = 0;
};

struct RankUsage {
  Nanoseconds busy{0};    // compute and update
  Nanoseconds idle{0};    // step_time - busy
  IdleSplit split = {};   // parts of `idle`
  Bytes peak_activation;  // largest sum of stashes
  Bytes peak_memory;      // state + peak_activation
};

// The bytes that a rank holds from `time` on: state + stashes.
struct MemoryStep {
  Nanoseconds time{0};
  Bytes bytes;
  friend bool operator==(const MemoryStep&, const MemoryStep&) = default;
};

struct SimResult {
  Nanoseconds step_time{0};
  std::vector<RankUsage> ranks;
  double bubble = 0;  // idle time of all ranks / (ranks x step time)
  BubbleSplit bubble_split;
  schedule::Timeline timeline;
  std::vector<std::vector<MemoryStep>> memory;  // by rank: the state at 0, then every change
};

// Replays a schedule. Returns kBadInput for:
//
// - a schedule that the checker refuses: its message says what is wrong, or which actions wait for
//   each other
// - other numbers than one cost for each stage and one cluster rank for each schedule rank
// - costs or links that are negative or NaN, or a speed that is not positive
// - sums of 2^62 ns or bytes and more
[[nodiscard]] Expected<SimResult> simulate(const schedule::Schedule& lowered,
                                           std::span<const StageCost> stages,
                                           const cost::Cluster& cluster, SimOptions options = {});

// A schedule whose lists the checker has accepted, for callers that replay it against many costs.
// Every replay still finds whether actions wait for each other. A value; immutable.
class CheckedSchedule {
 public:
  // Checks the schedule. Fails with kBadInput and the checker's message.
  [[nodiscard]] static Expected<CheckedSchedule> make(schedule::Schedule lowered);
  [[nodiscard]] const schedule::Schedule& schedule() const { return schedule_; }

 private:
  explicit CheckedSchedule(schedule::Schedule schedule) : schedule_(std::move(schedule)) {}
  schedule::Schedule schedule_;
};

// Like simulate() of a Schedule, without checking the lists again.
[[nodiscard]] Expected<SimResult> simulate(const CheckedSchedule& checked,
                                           std::span<const StageCost> stages,
                                           const cost::Cluster& cluster, SimOptions options = {});

// Returns StageCost::reduction of `gradients` by a ring of `replicas` over a link of its own.
// (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC
// 69, 2009.) The ring has 2 (d - 1) rounds for d replicas. In each one every replica passes on a
// d-th of the bytes, which takes latency + bytes / d / bandwidth.
//
// A longer time is returned as 2^62 ns, which simulate() refuses. Requires 1 or more replicas,
// bytes of 0 or more, and a valid link.
[[nodiscard]] Nanoseconds all_reduce_time(Bytes gradients, int replicas, const cost::Link& link);

}  // namespace dynmo::sim
