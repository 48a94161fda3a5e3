// SPDX-License-Identifier: Apache-2.0
#pragma once

// A training run as processes: what one rank's process does from its environment to its end, and
// how a launcher starts them. Shared by the command line and by programs of the user's own.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

struct RankProcess {
  TrainOptions options;
  Reporter reporter;  // rank 0's text
  // Wraps the rank's transport, for tests: faults at scripted messages.
  std::function<std::unique_ptr<transport::Transport>(std::unique_ptr<transport::Transport>)>
      decorate = {};
};

// Whether somebody has started this process as a rank (RANK and WORLD_SIZE are set). kBadInput for
// a broken environment.
[[nodiscard]] Expected<bool> is_rank_process();

// kBadInput: a flag has set pipeline.ranks, and a launcher has started other ranks than these.
[[nodiscard]] Expected<void> check_asked_ranks(const config::Config& config);

// Refuses a config that is not valid, or whose replicas do not divide the ranks, at once; else
// joins the group of the environment, trains, and leaves the group or ends it for all. One thread
// of tensor operations. The caller prints the error and ends the process by c10d::quit.
[[nodiscard]] Expected<void> run_rank(const RankProcess& process);

// Ranks of one replica, for a valid config: pipeline.ranks; where that is 0 min(4, usable cores of
// each replica), at least 2 (with several replicas 1).
[[nodiscard]] int ranks_to_start(const config::Config& config);

// dry_run (run.h) for the ranks that `launch` would start, or that somebody has started: then
// rank 0 has the text, the others have an empty one. On the ranks of `cluster` where there is one,
// which are as many; on one host without.
[[nodiscard]] Expected<std::string> dry_run_text(const TrainOptions& options,
                                                 const std::optional<cost::Cluster>& cluster);

// Checks the inputs once for all ranks, then runs `command` as that many ranks of this host for
// each replica until all have ended. Returns the exit code of the run. `late_command` joins the run
// (joining.h), where `dynmo ctl RUN grow` asks for more ranks.
[[nodiscard]] Expected<int> launch(const TrainOptions& options,
                                   const std::vector<std::string>& command,
                                   const std::vector<std::string>& late_command = {});

}  // namespace dynmo::train
