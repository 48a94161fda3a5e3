// SPDX-License-Identifier: Apache-2.0
#pragma once

// A whole training run as one rank sees it: data, first plan, steps, validation, records,
// checkpoints, summary. With `compare` it advances several runs of the same training in turn, step
// by step, so that a noisy machine treats them alike.

#include <functional>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/train/setup/inputs.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Called by all ranks of the group with equal options. Requires at::set_num_threads(1) or the same
// number on all.
[[nodiscard]] Expected<void> train(transport::Transport& transport, const TrainOptions& options,
                                   const Reporter& reporter = {});

// The same of a run whose groups may change (elastic.enabled). A rank that leaves returns when its
// part is done; kInterrupted where the run was stopped, after a checkpoint.
[[nodiscard]] Expected<void> train(elastic::Groups& groups, const TrainOptions& options,
                                   const Reporter& reporter = {});
// Entry point of a joining process, in the group to which it was admitted. `options` are those of
// the run. `taken` is called when it is a rank of the run: an error before that is none of the
// run's.
[[nodiscard]] Expected<void> join(elastic::Groups& groups, const TrainOptions& options,
                                  const Reporter& reporter, const std::function<void()>& taken);

}  // namespace dynmo::train
