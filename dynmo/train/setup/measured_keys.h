// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys of a run that are "auto", such as pruning.sparse_above. They are measured once, before the
// first step, and are numbers in the run's config from then on. So a resumed run has the same bits,
// whatever a clock would measure by then.

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/train/setup/inputs.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Returns the config of a run to resume. Keys of enabled sources that are "auto" get the values of
// the config in run.directory. Returns kBadInput if that cannot be read or lacks them.
[[nodiscard]] Expected<config::Config> resumed_config(config::Config config);

// Lets the sources measure, before the first step. All ranks call it at once, so that the machine
// is as busy as in training. Sets the keys of the config to the values of rank 0. If anything was
// measured, opens `inputs` again, and rank 0 prints it.
[[nodiscard]] Expected<void> measure_keys(transport::Transport& transport, TrainOptions& options,
                                          Inputs& inputs, const Reporter& reporter);

}  // namespace dynmo::train
