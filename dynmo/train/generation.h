// SPDX-License-Identifier: Apache-2.0
#pragma once

// A run's part of one group: what is bound to the group's transport and ends with it. What goes on
// is the rank's state, which close() gives back, and what the run has written (run_log.h).

#include <filesystem>
#include <functional>
#include <memory>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/checkpointer.h"
#include "dynmo/train/setup/inputs.h"
#include "dynmo/transport/traffic.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// One of the runs that advance in turn.
struct RunLane {
  int number = 0;
  runtime::Balancing balancing = runtime::Balancing::kAutomatic;
  std::filesystem::path directory;
  Waiting checkpoints_wait = Waiting::kNever;
  std::shared_ptr<checkpoint::BackgroundWriter> writer = {};
  // Whether this rank has something to tell all before the next step.
  std::function<bool()> asks = {};
};

// The same calls at the same points on all ranks of the group.
class GroupRun {
 public:
  // The group, config and inputs outlive it. `cluster` is that of a replica; `state` is this rank's
  // under a plan of the group's ranks.
  GroupRun(transport::Transport& group, const config::Config& config, const Inputs& inputs,
           const RunLane& lane, cost::Cluster cluster, runtime::RankState state);

  [[nodiscard]] Expected<runtime::StepReport> step();
  // Mean loss of the configured number of held-out steps.
  [[nodiscard]] Expected<double> validate(model::Pass pass = model::Pass::kValidation);
  // Goes on with the checkpoint under way, begins one if it is due. Requires checkpoints().
  [[nodiscard]] Expected<void> checkpoint(bool due);
  // Ends this part; what checkpoints are under way was finished before.
  [[nodiscard]] runtime::RankState close() { return pipeline_->take_state(); }

  [[nodiscard]] runtime::Pipeline& pipeline() { return *pipeline_; }
  [[nodiscard]] const runtime::Pipeline& pipeline() const { return *pipeline_; }
  // The cluster when the group began; decisions are made for pipeline().cluster().
  [[nodiscard]] const cost::Cluster& cluster() const { return cluster_; }
  [[nodiscard]] Checkpointer* checkpoints() const { return checkpointer_.get(); }  // null: none
  [[nodiscard]] const transport::CountingTransport& transport() const { return *transport_; }

 private:
  const config::Config& config_;
  const Inputs& inputs_;
  cost::Cluster cluster_;
  std::unique_ptr<transport::CountingTransport> transport_;  // outlives what uses it
  std::unique_ptr<runtime::Pipeline> pipeline_;
  std::unique_ptr<Checkpointer> checkpointer_;
};

}  // namespace dynmo::train
