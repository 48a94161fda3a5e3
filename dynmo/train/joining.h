// SPDX-License-Identifier: Apache-2.0
#pragma once

// `dynmo train --join`: a process comes to an active run, describes itself and waits. It becomes a
// rank when the run accepts it.

#include <functional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/train/rank_process.h"
#include "dynmo/train/setup/options.h"

namespace dynmo::train {

struct JoinOptions {
  std::string run;          // folder of the run, or HOST:PORT of its leader
  std::string secret_file;  // "": RUN/secret; required with HOST:PORT
  // Path of the data on this host, the joiner's only own setting. Other settings are the run's.
  std::string data;
};

// Trains as a rank until the run ends or releases it. Returns kBadInput, in one line, if there is
// no such run or the leader refuses it. Returns kPeerLost if the run ended first.
[[nodiscard]] Expected<void> join_run(const JoinOptions& join, const RankProcess& process);

// Returns whether an elastic run is active in the folder `run` on this host.
[[nodiscard]] bool run_goes_on(const std::string& run);

}  // namespace dynmo::train
