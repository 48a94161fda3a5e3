// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replays one step of a lowered schedule against per-stage costs, in integer nanoseconds and with
// the engine's rules: receives posted as the schedule says, a transfer starts when both ends are
// posted, sends waited for at the end (docs/simulator.md). Pure and deterministic; the planner
// scores candidates with it. Time and memory are linear in the number of actions; where messages
// queue for a node's network card, each also costs the logarithm of the messages under way.

#include <span>
#include <utility>
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
  // Once a step, after the last action, send and reduction of all ranks: the global gradient norm
  // that clips it needs every gradient. 0 if frozen.
  Nanoseconds update{0};
  // Once a step, from the end of the stage's last W (or B): its gradients summed over the replicas
  // of a data-parallel job (all_reduce_time). Beside compute; the stages of a rank in turn, at any
  // speed of the rank. 0 if frozen.
  Nanoseconds reduction{0};
  Bytes state = {};       // parameters, gradients, optimizer
  Bytes activation = {};  // stash of a micro-batch, from the start of F to the end of W (0 for a
                          // frozen stage)
  Bytes boundary = {};    // message to the next stage, and the gradient back
};

struct SimOptions {
  // Record SimResult::timeline: compute actions from start to end; a send and its receive, each on
  // its own rank, from the moment both are posted to the arrival.
  bool timeline = false;
  bool memory = false;  // record SimResult::memory
};

// Why a rank is idle; the parts are 0 or more and add up to its idle time exactly. T is the step
// time, T0 the step time of the same lists if messages and reductions were free and immediate.
struct IdleSplit {
  Nanoseconds fill_drain{0};     // T0 - busy time of the busiest rank
  Nanoseconds imbalance{0};      // less work than the rank with the most: a better cut would help
  Nanoseconds communication{0};  // exposed: T - T0
  Nanoseconds straggler{0};      // a slower rank has it wait, though the work is even
};

// The same over all ranks, as fractions of ranks x step time: they add up to the bubble.
struct BubbleSplit {
  double fill_drain = 0;
  double imbalance = 0;
  double communication = 0;
  double straggler = 0;
};

struct RankUsage {
  Nanoseconds busy{0};    // compute and update
  Nanoseconds idle{0};    // step_time - busy
  IdleSplit split = {};   // of idle
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

// kBadInput: a schedule that the checker refuses (with its message: what is wrong, or which actions
// wait for each other); not one cost a stage and one cluster rank a schedule rank; costs or links
// that are negative or NaN, a speed that is not positive; sums of 2^62 ns or bytes and more.
[[nodiscard]] Expected<SimResult> simulate(const schedule::Schedule& lowered,
                                           std::span<const StageCost> stages,
                                           const cost::Cluster& cluster, SimOptions options = {});

// A schedule whose lists the checker has accepted, for callers who replay it against many costs.
// Whether its actions wait for each other is found by every replay. A value; immutable.
class CheckedSchedule {
 public:
  // kBadInput with the checker's message.
  [[nodiscard]] static Expected<CheckedSchedule> make(schedule::Schedule lowered);
  [[nodiscard]] const schedule::Schedule& schedule() const { return schedule_; }

 private:
  explicit CheckedSchedule(schedule::Schedule schedule) : schedule_(std::move(schedule)) {}
  schedule::Schedule schedule_;
};

// The same result and errors.
[[nodiscard]] Expected<SimResult> simulate(const CheckedSchedule& checked,
                                           std::span<const StageCost> stages,
                                           const cost::Cluster& cluster, SimOptions options = {});

// StageCost::reduction of so many bytes by a ring of `replicas` over a link of its own: in each of
// 2 (d - 1) rounds every replica passes on a d-th of the bytes, which takes latency + bytes / d /
// bandwidth (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", JPDC 69, 2009). At most 2^62 ns, which simulate() refuses. Requires 1 or more
// replicas, bytes of 0 or more, a valid link.
[[nodiscard]] Nanoseconds all_reduce_time(Bytes gradients, int replicas, const cost::Link& link);

}  // namespace dynmo::sim
