// SPDX-License-Identifier: Apache-2.0
#pragma once

// A training run as processes. Here are the work of one rank's process from start to end, the
// launcher of all ranks, and processes that join a run. The command line and programs of users
// share it.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/train/setup/resolved_run.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

struct RankProcess {
  TrainOptions options;
  Reporter reporter;  // rank 0's text
  // Wraps the rank's transport, for tests with faults at scripted messages.
  std::function<std::unique_ptr<transport::Transport>(std::unique_ptr<transport::Transport>)>
      decorate = {};
};

// Returns whether this process was started as a rank (RANK and WORLD_SIZE are set). Returns
// kBadInput for a broken environment.
[[nodiscard]] Expected<bool> is_rank_process();

// Returns kBadInput if a flag has set pipeline.ranks, and a launcher has started another number of
// ranks.
[[nodiscard]] Expected<void> check_asked_ranks(const config::Config& config);

// Opens the device that run.device names for the calling thread, and sets it in `options`.
// RankDevice::channels stays null. Does nothing if run.device names no device with its own memory.
// `local_rank` is the rank's number on this host. Returns kBadInput if there is no such device.
[[nodiscard]] Expected<void> open_rank_device(ValidOptions& options, int local_rank);

// Trains as a rank. First refuses a config that is not valid, or whose replicas do not divide the
// ranks. Then joins the group of the environment, trains, and leaves the group, or ends it for all
// after an error. Uses one thread for tensor operations. The caller prints the error and ends the
// process by c10d::quit.
[[nodiscard]] Expected<void> run_rank(const RankProcess& process);

// Returns the ranks of one replica, for a valid config: pipeline.ranks. If that is 0, it is min(4,
// usable cores of each replica), and at least 2 (with several replicas 1).
[[nodiscard]] int ranks_to_start(const config::Config& config);

// Returns the text of dry_run() for the ranks that launch() would start. In a process that was
// started as a rank, rank 0 gets the text, and the others get "". The ranks are those of `cluster`,
// which has the same number. Without a cluster they are on one host.
[[nodiscard]] Expected<std::string> dry_run_text(const TrainOptions& options,
                                                 const std::optional<cost::Cluster>& cluster);

// Checks the run once for all ranks. Then runs `command` for each rank of each replica on this
// host, until all have ended. Returns the exit code of the run. `late_command` joins the run
// after `dynmo ctl RUN grow` has asked for more ranks.
[[nodiscard]] Expected<int> launch(const TrainOptions& options,
                                   const std::vector<std::string>& command,
                                   const std::vector<std::string>& late_command = {});

// The options of `dynmo train --join`.
struct JoinOptions {
  std::string run;          // folder of the run, or HOST:PORT of its leader
  std::string secret_file;  // "": RUN/secret; required with HOST:PORT
  // Path of the data on this host, the joiner's only own setting. Other settings are the run's.
  std::string data;
};

// Comes to an active run, describes this process and waits until the run accepts it. Then trains as
// a rank until the run ends or releases it. Returns kBadInput, in one line, if there is no such run
// or the leader refuses it. Returns kPeerLost if the run ended first.
[[nodiscard]] Expected<void> join_run(const JoinOptions& join, const RankProcess& process);

// Returns whether an elastic run is active in the folder `run` on this host.
[[nodiscard]] bool run_goes_on(const std::string& run);

}  // namespace dynmo::train
