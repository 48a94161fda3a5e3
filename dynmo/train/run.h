// SPDX-License-Identifier: Apache-2.0
#pragma once

// A whole training run on one rank: data, first plan, steps, validation, records, checkpoints,
// summary. With `compare` it advances several runs of the same training in turn, step by step. So a
// noisy machine affects them equally.

#include <functional>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/train/setup/resolved_run.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Trains. All ranks of the group call it with equal options. Requires the same
// at::set_num_threads() on all ranks, usually 1. Returns the errors of its setup, and kPeerLost if
// a rank is lost.
[[nodiscard]] Expected<void> train(transport::Transport& transport, const TrainOptions& options,
                                   const Reporter& reporter = {});

// Like train(), for a run whose groups may change (elastic.enabled). A rank that leaves returns
// when its part is done. Returns kInterrupted if the run was stopped, after a checkpoint.
[[nodiscard]] Expected<void> train(elastic::Groups& groups, const ValidOptions& options,
                                   const Reporter& reporter = {});
// Trains as a joining process, in the group to which it was admitted. `run` has the config of that
// run. `taken` is called when it becomes a rank. An earlier error does not affect the run.
[[nodiscard]] Expected<void> join(elastic::Groups& groups, ResolvedRun run,
                                  const Reporter& reporter, const std::function<void()>& taken);

}  // namespace dynmo::train
