// SPDX-License-Identifier: Apache-2.0
#pragma once

// The messages of a group between two plans, counted by all ranks, and predicted from each step's
// plan and costs.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/traffic.h"
#include "dynmo/observe/traffic_log.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/step_report.h"
#include "dynmo/train/generation.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Counts the messages under each plan. All ranks of a group make the same calls at the same points.
// An interval is returned at its end, equal on all ranks, with the world ranks of the group. A move
// during a step counts to the interval of that step's plan. Another move counts to that of its new
// plan, unless ranks leave after it.
class TrafficIntervals {
 public:
  using Ended = Expected<std::optional<observe::TrafficInterval>>;

  explicit TrafficIntervals(const config::Config& config) : config_(config) {}

  // Begins a group. Its messages so far are not counted.
  void begin(const GroupRun& run);
  [[nodiscard]] Ended before_step(transport::Transport& group, const GroupRun& run);
  [[nodiscard]] Ended after_step(transport::Transport& group, const GroupRun& run,
                                 const runtime::StepReport& report);
  // Adds a snapshot, which has sent layers to their keepers, by world rank.
  void copied(const GroupRun& run, std::span<const WorldRank> keepers);
  // Adds a validation, which ran forward on the config's number of held-out batches.
  void validated();
  // Ends the group. Returns nothing if there was no step.
  [[nodiscard]] Ended end(transport::Transport& group, const GroupRun& run);

 private:
  using Counts = std::vector<MessageCount>;  // CountingTransport::row

  [[nodiscard]] Ended close(transport::Transport& group, const GroupRun& run, const Counts& until);
  // Predicts the messages of a step of the plan in force.
  void predict_step(const GroupRun& run, int frozen_layers);
  void add_steps();
  void add_move(const GroupRun& run);

  const config::Config& config_;
  plan::Plan plan_;
  std::optional<plan::Plan> coming_;  // layers have moved to it during the newest step
  std::int64_t first_step_ = 0;
  std::int64_t steps_ = 0;
  Counts begun_;
  Counts newest_;  // before the newest step
  TrafficRows predicted_;
  // The messages of one step. `predicted_` lacks them `times_` times.
  TrafficRows step_;
  std::int64_t times_ = 0;
  int frozen_layers_ = -1;  // of `step_`; -1: not known
};

}  // namespace dynmo::train
