// SPDX-License-Identifier: Apache-2.0
#pragma once

// A run's part of one group: all that is bound to the group's transport and ends with it. The
// rank's state outlives it, which close() returns, and so do the files of the run (run_log.h).

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "dynmo/control/controller.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/elastic/member.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/runtime/rank_state.h"
#include "dynmo/train/checkpointer.h"
#include "dynmo/train/setup/resolved_run.h"
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
  // Returns whether this rank has a message for all before the next step.
  std::function<bool()> asks = {};
};

// One rank's part of a run during one group. All ranks of the group make the same calls at the same
// points. Calls return kPeerLost if a rank is lost.
class GroupRun {
 public:
  // Opens this rank's part. The group and the run outlive it. `cluster` is that of a replica.
  // `state` is this rank's state under a plan of the group's ranks.
  GroupRun(transport::Transport& group, const ResolvedRun& run, const RunLane& lane,
           cost::Cluster cluster, runtime::RankState state);

  [[nodiscard]] Expected<runtime::StepReport> step();
  // Returns the mean loss of the configured number of held-out steps.
  [[nodiscard]] Expected<double> validate(model::Pass pass = model::Pass::kValidation);
  // Continues a checkpoint in progress, and begins one if it is due. Requires checkpoints().
  [[nodiscard]] Expected<void> checkpoint(bool due);
  // Plans from what the rank's controller has measured, if it has measured anything.
  [[nodiscard]] Expected<void> go_on() {
    return pipeline_->costs() ? pipeline_->go_on() : Expected<void>();
  }
  // Closes the channels between devices, when nothing is in flight. All ranks of the group call it.
  // A pipeline of the group opens them again. Fails with kPeerLost.
  [[nodiscard]] Expected<void> close_channels();
  // Ends this part. A checkpoint in progress must be finished before.
  [[nodiscard]] runtime::RankState close() { return pipeline_->take_state(); }

  [[nodiscard]] runtime::Pipeline& pipeline() { return *pipeline_; }
  [[nodiscard]] const runtime::Pipeline& pipeline() const { return *pipeline_; }
  // Returns the cluster at the beginning of the group. Decisions use pipeline().cluster().
  [[nodiscard]] const cost::Cluster& cluster() const { return cluster_; }
  [[nodiscard]] Checkpointer* checkpoints() const { return checkpointer_.get(); }  // null: none
  [[nodiscard]] const transport::CountingTransport& transport() const { return *transport_; }

 private:
  const ResolvedRun& run_;
  cost::Cluster cluster_;
  c10d::ChannelTransport* channels_;                         // of the group, or null
  std::unique_ptr<transport::CountingTransport> transport_;  // outlives its users
  std::unique_ptr<runtime::Pipeline> pipeline_;
  std::unique_ptr<Checkpointer> checkpointer_;
};

// A rank between two groups, in a change of size (regrouping.h) or after a loss (surviving.cpp).
// Its layers are in `state` or in `next`, also after an error. So a loss may come at any time.
struct Passage {
  runtime::RankState state = {};
  // The decisions of the group in force, for a rank that returns to it. None after a loss.
  std::optional<control::Controller> controller = {};
  cost::Cluster cluster = {};                // of the newest group that this rank has left
  std::unique_ptr<GroupRun> next = nullptr;  // this rank's part of the group that forms

  // From a loss until the run is whole again, which may take more than one recovery.
  struct Lost {
    elastic::View before;    // the members before the first loss
    elastic::View numbered;  // the controller's ranks are their positions
    std::vector<elastic::MemberId> spares = {};
  };
  std::optional<Lost> lost = {};  // none: a change of size

  // Ends this rank's part of a group.
  void leave(std::unique_ptr<GroupRun> part);
  // Makes `next`, in a group whose ranks have an equal `plan`. All its ranks call it. Their layers
  // move to their new places. They are those of `step`, after a loss, or else the live ones.
  [[nodiscard]] Expected<void> form(transport::Transport& group, const ResolvedRun& run,
                                    const RunLane& lane, cost::Cluster measured,
                                    const plan::Plan& plan, std::optional<std::int64_t> step = {});
  // Ends `next`, before its transport ends. `state` has the decisions of the group in force again.
  void take_back();
};

}  // namespace dynmo::train
