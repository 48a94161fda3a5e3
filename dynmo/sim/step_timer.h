// SPDX-License-Identifier: Apache-2.0
#pragma once

// The step time of one lowered schedule against many costs, for searches that replay thousands of
// cuts and ask for nothing else. The dependencies of a schedule do not change with its costs. So
// they are brought into an order once, and a replay is one pass over the compute actions.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::sim {

// Computes the step time of one schedule for many costs. Not thread-safe: it keeps the times of the
// last replay to save allocations.
class StepTimer {
 public:
  // Checks and orders a schedule. Returns the kBadInput of simulate() for it.
  [[nodiscard]] static Expected<StepTimer> make(schedule::Schedule lowered);

  // Returns SimResult::step_time of simulate(), and its errors. Messages that queue for network
  // cards have no fixed order. With such links it calls simulate().
  [[nodiscard]] Expected<Nanoseconds> step_time(std::span<const StageCost> stages,
                                                const cost::Cluster& cluster);
  [[nodiscard]] const schedule::Schedule& schedule() const { return checked_.schedule(); }

 private:
  // A compute action. Actions count from 1 in the order of the pass, and 0 is the start.
  struct Compute {
    std::uint32_t before = 0;    // the action before it on its rank
    std::uint32_t sent = 0;      // action whose end sends the message that it awaits
    std::uint32_t posted = 0;    // action whose end posts that message's receive
    std::uint32_t channel = 0;   // of that message; the last one is of none
    std::uint32_t duration = 0;  // stage x kDurations + kind
  };
  // The reduction of a stage's gradients, behind its last weight gradient. A rank's reductions run
  // one after another.
  struct Reduction {
    std::uint32_t after = 0;  // action
    std::uint32_t rank = 0;
    std::uint32_t stage = 0;
  };
  static constexpr std::size_t kDurations = 4;  // F, B, I, W

  explicit StepTimer(CheckedSchedule checked) : checked_(std::move(checked)) {}
  [[nodiscard]] bool sort();

  CheckedSchedule checked_;
  std::vector<Compute> actions_;
  std::vector<Reduction> reductions_;
  std::vector<std::int64_t> ends_;       // of the actions
  std::vector<std::int64_t> durations_;  // as Compute::duration
  std::vector<std::int64_t> transfers_;  // by channel, then 0
};

}  // namespace dynmo::sim
