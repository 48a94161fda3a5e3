// SPDX-License-Identifier: Apache-2.0
#pragma once

// The `adaptive` schedule: an order made from the actual costs of every stage. It takes any
// placement of stages and a memory limit for each rank.
//
// A list scheduler makes it. A free rank runs the action that is due first among those whose inputs
// have arrived. It waits instead if an action that is due earlier arrives soon. A few numbers
// (DuePolicy) derive due dates from the costs, and plan::search tunes them (docs/planner.md).
//
// The order cannot deadlock, because an F is admitted by the banker's rule (Dijkstra 1965). The
// rule looks at the older micro-batches that are still on their way forward on this rank. Each must
// be able to reach its last stage there once those before it have finished. So the oldest
// unfinished micro-batch can always take its next action on every rank.

#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

// Costs of a micro-batch on the rank that holds the stage. For a frozen stage only the forward half
// counts.
struct StageTiming {
  Nanoseconds forward{0};
  Nanoseconds input_gradient{0};
  Nanoseconds weight_gradient{0};
  Nanoseconds activation_transfer{0};  // message from the previous stage; 0 on the same rank
  Nanoseconds gradient_transfer{0};    // message from the next stage; 0 on the same rank
  Bytes stash;                         // from the start of F to the end of W
  Bytes restored;                      // more from the start of I, where layers are recomputed
};

// Due dates of micro-batch m. The period T is the largest work of a rank for one micro-batch.
//
//   F(s, m) = m T + forward x (time of a lone F to reach s) + offset
//   I(s, m) = m T + forward x (time of all F) + gradient x (time of a lone I back to s) + offset
//   W(s, m) = that of I(s, m) without offset + weight_delay x T + offset
//
// A rank may wait although it could run an action. It does so if an action that is due earlier will
// arrive within `wait` x the duration of the action that it could run. All factors are integers in
// parts of kWhole, so every machine makes the same order.
struct DuePolicy {
  static constexpr int kWhole = 1024;
  struct Offset {  // in parts of T
    int forward = 0;
    int input_gradient = 0;
    int weight_gradient = 0;
    friend bool operator==(const Offset&, const Offset&) = default;
  };
  int forward = kWhole;
  int gradient = kWhole;
  int weight_delay = kWhole;
  int wait_for_weight = 3 * kWhole / 10;  // `wait` if the action that could run is a W
  int wait_for_others = 3 * kWhole / 10;  // `wait` if it is an F or I
  std::vector<Offset> offsets = {};       // by stage, or empty
  friend bool operator==(const DuePolicy&, const DuePolicy&) = default;
};

struct AdaptiveProblem {
  PipelineShape shape;
  std::vector<StageTiming> stages;  // by stage
  std::vector<Bytes> stash_limit;   // by rank: most bytes of stashes at once, restored ones too
};

struct AdaptiveSchedule {
  Schedule schedule;        // compute-only
  Nanoseconds makespan{0};  // of a replay of the lowered schedule, without updates
};

// Makes an adaptive schedule.
//
// Returns kBadInput for an invalid shape, counts that do not fit it, costs below 0, or times whose
// sum needs more than 62 bits. Returns kInfeasible if one micro-batch alone exceeds the limit of a
// rank. The message names the rank and the bytes that would suffice.
[[nodiscard]] Expected<AdaptiveSchedule> make_adaptive(const AdaptiveProblem& problem,
                                                       const DuePolicy& policy = {});

// Like make_adaptive(), for a search that makes hundreds of thousands of orders. It allocates only
// if a problem is larger than all before it, trusts its input and stops early. Any thread may use
// it, one at a time.
class ListScheduler {
 public:
  // Takes over the numbers of a problem that make_adaptive() would accept.
  void load(const PipelineShape& shape, std::span<const StageTiming> stages,
            std::span<const Bytes> stash_limit);
  // Returns the period T: the largest work of a rank for a micro-batch.
  [[nodiscard]] std::int64_t period() const { return period_; }

  static constexpr std::int64_t kStopped = INT64_MAX;
  // Returns the makespan in nanoseconds, or kStopped as soon as it is certain to exceed `bound`.
  [[nodiscard]] std::int64_t run(const DuePolicy& policy, std::int64_t bound);
  // Returns the number of actions that all calls of run() have placed. It measures their cost in a
  // unit that does not depend on the machine.
  [[nodiscard]] std::int64_t placed() const { return placed_; }
  // Like run(), and keeps the order.
  [[nodiscard]] AdaptiveSchedule record(const DuePolicy& policy);

 private:
  // Actions that are due at once run in this order.
  enum Kind : int { kW = 0, kF = 1, kI = 2 };
  static constexpr int kKinds = 3;
  static constexpr int kStride = 4;  // a power of 2
  static constexpr std::int64_t kUnknown = std::int64_t{1} << 62;
  // The progress of one stage. Slots of a rank are neighbours, in the order of the stages.
  struct alignas(64) Slot {
    // Time at which the input of the next action existed, or kUnknown. It is always 0 for a W.
    std::int64_t ready[kKinds] = {};
    std::int64_t transfer[kKinds] = {};
    std::int64_t duration[kKinds] = {};
    std::int64_t due[kKinds] = {};  // of the next action, whether or not it can run
    int head[kKinds] = {};          // micro-batch of the next action
    int rank = 0;
    // Rows of `done_`, for F and I. `input` has the ends of the actions that make their input,
    // `output` their own ends.
    std::size_t input[kKinds] = {};
    std::size_t output[kKinds] = {};
    // Slot with the F or I that takes the output of this F or I. The last slot stands for none.
    int reader[kKinds] = {};
    Kind reads[kKinds] = {};
    std::int64_t stash = 0;
    std::int64_t restored = 0;
    std::int64_t stash_before = 0;  // of the rank's earlier stages
    std::int64_t stash_behind = 0;  // of this stage and the rank's later ones
    // Stash of the micro-batches from the next F's on, in the rank's earlier stages.
    std::int64_t ahead = 0;
    int stage = 0;
    bool frozen = false;
  };
  struct RankState {
    std::int64_t free = 0;  // end of the last action
    // End of the action before it, at which the next action's receive is posted.
    std::int64_t posted = 0;
    std::int64_t left = 0;   // work not placed yet
    std::int64_t held = 0;   // sum of stashes
    std::int64_t limit = 0;  // of `held`: what the largest restored stash leaves
    std::int64_t back = 0;   // sum of restored stashes
    std::int64_t most = 0;   // limit of both sums
    std::int64_t stash = 0;  // of one micro-batch, all stages
    int first = 0;           // slots [first, end)
    int end = 0;
  };
  // The earliest start of each rank's next action, or kStopped. The last `rank_bits` bits are the
  // rank. So the least value names the rank that wakes first, and the lowest rank among equals.
  struct Wakes {
    std::vector<std::int64_t> at;
    int rank_bits = 0;

    [[nodiscard]] std::int64_t value(std::int64_t time, std::size_t rank) const {
      return (time << rank_bits) + static_cast<std::int64_t>(rank);
    }
  };
  struct Choice {
    int slot = -1;
    Kind kind = kF;
  };

  void connect();
  void start(const DuePolicy& policy);
  [[nodiscard]] std::int64_t first_wake() const;
  [[nodiscard]] bool admits(const RankState& rank, int slot) const;
  [[nodiscard]] static bool restores(const RankState& rank, const Slot& slot) {
    return slot.restored <= rank.most - rank.held - rank.back;
  }
  [[nodiscard]] Choice choose(std::size_t rank, std::int64_t now);
  [[nodiscard]] std::int64_t next_arrival(std::size_t rank, std::int64_t now) const;
  void place(std::size_t rank, Choice choice);
  void note(const Slot& slot, Kind kind);
  void pass_on(const Slot& slot, Kind kind, int micro_batch, std::int64_t end);
  [[nodiscard]] std::size_t row(int slot, Kind kind) const {
    return (static_cast<std::size_t>(slot) * 2 + (kind == kI ? 1U : 0U)) *
           (static_cast<std::size_t>(shape_.micro_batches) + 1);
  }
  [[nodiscard]] std::int64_t& known_due(int slot, Kind kind) {
    return known_due_[static_cast<std::size_t>(kStride * slot + kind)];
  }

  PipelineShape shape_;
  std::int64_t period_ = 0;
  std::int64_t actions_ = 0;
  std::int64_t placed_ = 0;
  std::int64_t wait_[kKinds] = {};
  std::vector<int> slot_of_;  // by stage
  std::vector<Slot> slots_;
  std::vector<RankState> ranks_;
  // The due date of the next action at kStride x slot + kind, or kStopped if its input is not known
  // yet.
  std::vector<std::int64_t> known_due_;
  Wakes wakes_;
  // Ends of F and I by slot, kind and micro-batch, or kUnknown if there is none yet. A row has one
  // micro-batch more than there is, which never ends. A row of zeros stands for the inputs of the
  // first stage.
  std::vector<std::int64_t> done_;
  std::vector<std::vector<Action>>* record_ = nullptr;
};

}  // namespace dynmo::schedule
