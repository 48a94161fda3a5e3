// SPDX-License-Identifier: Apache-2.0
#pragma once

// `dynmo train --join`: a process that comes to a run that goes on, shows what it is, waits,
// and becomes a rank when the run takes it.

#include <functional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/train/rank_process.h"
#include "dynmo/train/setup/options.h"

namespace dynmo::train {

struct JoinOptions {
  std::string run;          // folder of the run, or HOST:PORT of its leader
  std::string secret_file;  // "": RUN/secret; wanted with HOST:PORT
  // The newcomer's own setting: where the data lies here. Other settings are the run's.
  std::string data;
};

// Trains as a rank until the run ends or releases it. kBadInput: no such run, or the leader refuses
// it, in one line. kPeerLost: the run ended first.
[[nodiscard]] Expected<void> join_run(const JoinOptions& join, const RankProcess& process);

// Whether the leader of an elastic run answers whose folder on this host is `run`.
[[nodiscard]] bool run_goes_on(const std::string& run);

}  // namespace dynmo::train
