// SPDX-License-Identifier: Apache-2.0
#pragma once

// A Score sums the time and the results of a run of a scenario so far.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "dynmo/scenario/replay_impl.h"
#include "dynmo/scenario/run.h"

namespace dynmo::scenario {

// The ranks that the job holds while time passes.
struct RanksHeld {
  std::size_t in_use = 0;   // including those without layers
  std::size_t present = 0;  // also those that were released
  std::size_t offered = 0;  // also those that were given back
  int replicas = 1;
};

class Score {
 public:
  explicit Score(std::string name) { result_.name = std::move(name); }

  // Adds `seconds` to a part of the run's time, during which the job held these ranks.
  void spend(double TimeSpent::*part, double seconds, const RanksHeld& ranks);
  void count_plan() { ++result_.plans; }
  // Adds a move. Bytes are those of all replicas, and layers those of one.
  void count_move(std::int64_t layers, double bytes);
  void count_bytes(double bytes) { result_.bytes_moved += bytes; }
  // Adds a step with these micro-batches of all replicas. `at_end` means one of the last tenth.
  void count(const StepMeasure& measure, double micro_batches, bool at_end, const RanksHeld& ranks);
  void keep(DecisionAt decision) { result_.decisions.push_back(std::move(decision)); }
  void keep(observe::TracedStep step) { result_.trace.push_back(std::move(step)); }

  // Marks a checkpoint. Later failures do not take back the steps before it.
  void checkpoint() { unsaved_ = {}; }
  // Takes back the steps since the last checkpoint and returns their number. Their time stays
  // spent, and their tokens do not count.
  std::int64_t go_back();

  // Returns the result of a run with `steps` steps. A micro-batch has `tokens_per_micro_batch`
  // tokens (0: not known).
  [[nodiscard]] RunResult finished(std::int64_t steps, std::int64_t tokens_per_micro_batch) &&;

 private:
  struct Sums {
    double weighted_bubble = 0;  // x step time
    double step_time = 0;
    double imbalance = 0;
    double ideal = 0;
    std::int64_t executed = 0;
    double end_step_time = 0;
    double end_ideal = 0;
    std::int64_t end_steps = 0;
    double rank_seconds = 0;     // in use
    double held_seconds = 0;     // including those without layers
    double offered_seconds = 0;  // also those that were released
  };
  struct Unsaved {  // since the last checkpoint
    double train_s = 0;
    double micro_batches = 0;
    std::int64_t steps = 0;
  };

  RunResult result_;
  Sums sums_ = {};
  Unsaved unsaved_ = {};
};

}  // namespace dynmo::scenario
