// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs of a scenario under policies, step by step, by the simulator. The charges for measuring,
// planning, moving, restarts and lost steps add up to the whole time. Deterministic: all random
// draws use the scenario's seed. Configured times replace measurements of a machine.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/control/policy.h"
#include "dynmo/core/expected.h"
#include "dynmo/observe/trace.h"
#include "dynmo/plan/question/advice.h"
#include "dynmo/scenario/job.h"
#include "dynmo/scenario/policy_name.h"

namespace dynmo::scenario {

// Seconds of the run. They add up to total_s.
struct TimeSpent {
  double train_s = 0;  // steps that counted
  double lost_s = 0;   // steps since the last checkpoint when ranks failed
  double profile_s = 0;
  double plan_s = 0;
  double move_s = 0;
  double restart_s = 0;
  [[nodiscard]] double total_s() const {
    return train_s + lost_s + profile_s + plan_s + move_s + restart_s;
  }
};

struct DecisionAt {
  std::int64_t step = 0;  // before it
  control::Decision decision;
};

// Seconds of all steps of a run under other plans, with free moves and known costs.
struct OtherTimes {
  double kept_s = 0;  // the first plan, kept
  double best_s = 0;  // the balancer's plan for the costs of each step
  double past_s = 0;  // its plan for those of the previous step
};

struct RunResult {
  std::string name;
  TimeSpent time;
  double micro_batches = 0;  // that counted, of all replicas
  double tokens = 0;         // 0 if the model's sequence length is not known
  double step_time_s = 0;    // mean of the steps that counted
  // Lower bound of a step: all work over the speed of all ranks of the pipeline. Mean.
  double ideal_step_time_s = 0;
  struct End {  // means of the last tenth of the steps
    double step_time_s = 0;
    double ideal_step_time_s = 0;
  } end;
  double bubble = 0;           // mean over the time of all steps, of the ranks in use
  double imbalance = 0;        // mean over the steps, max / mean - 1 of the ranks in use
  double average_ranks = 0;    // in use, of all replicas, over the whole time
  double gpu_hours_saved = 0;  // of released ranks
  std::int64_t plans = 0;      // computed
  std::int64_t migrations = 0;
  std::int64_t layers_moved = 0;  // of one replica
  double bytes_moved = 0;         // of all replicas
  std::int64_t steps_lost = 0;
  std::int64_t steps_over_memory = 0;  // a rank's memory would not have sufficed
  std::vector<observe::TracedStep> trace;
  std::vector<DecisionAt> decisions;  // for which a plan was made, in their order
  std::optional<OtherTimes> others;   // of a re-planning run, if requested

  // Returns the micro-batches a second over the whole time. Unlike tokens_per_s() it is known if
  // the sequence length is not.
  [[nodiscard]] double micro_batches_per_s() const { return micro_batches / time.total_s(); }
  [[nodiscard]] double tokens_per_s() const { return tokens / time.total_s(); }
};

// A run's gain by re-planning, as shares of the possible gain over the first plan.
struct Shares {
  double cuts = 0;   // its steps, against the best plan of every step
  double whole = 0;  // its whole time, against the same
  double past = 0;   // its steps, against the best plans for the previous steps
};
// Returns the shares, or nullopt if other plans were not requested or gain nothing.
[[nodiscard]] std::optional<Shares> shares_of(const RunResult& run);

struct RunOptions {
  std::int64_t trace_steps = 0;  // last steps whose timelines are kept
  // Computes RunResult::others of re-planning runs, with one more plan for each step with new
  // costs.
  bool shares = false;
  std::function<void(std::int64_t step)> progress = {};
};

// Runs the job with the costs `load` under `policy`. A policy that cuts for the dense model uses
// the costs of job.dense. Returns kInfeasible if no cut of the balancer fits the memory, for the
// first step or for the ranks left by an event.
[[nodiscard]] Expected<RunResult> run(const Job& job, const dynamism::LoadModel& load,
                                      const Policy& policy, const RunOptions& options = {});

struct Comparison {
  RunResult dense;              // no dynamism, the even cut kept
  RunResult uniform;            // the dynamic model, the even cut kept: the baseline
  std::vector<RunResult> runs;  // as requested
  std::optional<plan::Advice> advice;

  [[nodiscard]] double speedup(const RunResult& run) const {
    return run.micro_batches_per_s() / uniform.micro_batches_per_s();
  }
  [[nodiscard]] double dense_speedup(const RunResult& run) const {
    return run.micro_batches_per_s() / dense.micro_batches_per_s();
  }
};

struct ComparisonProgress {
  std::string run;  // name
  int number = 0;   // of this run, from 0
  int runs = 0;
  std::int64_t step = 0;  // steps done; 0 once at the beginning
  std::int64_t steps = 0;
};

struct ComparisonOptions {
  std::int64_t trace_steps = 0;
  bool shares = false;  // RunOptions::shares; kBadInput with events
  std::function<void(const ComparisonProgress&)> progress = {};
};

// Runs dense, uniform, and the policies by name. Returns the errors of run(), and kBadInput for an
// unknown policy.
[[nodiscard]] Expected<Comparison> compare(const Job& job, const std::vector<std::string>& policies,
                                           const ComparisonOptions& options = {});

}  // namespace dynmo::scenario
