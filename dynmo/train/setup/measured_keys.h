// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys of a run that are "auto", such as pruning.sparse_above: measured once, before the first
// step, and numbers in the run's config from then on, so that a run that is resumed has the same
// bits whatever a clock would say by then.

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/train/setup/inputs.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// The config of a run that is to be resumed: what enabled sources have as "auto" is what the config
// in run.directory says. kBadInput: that cannot be read or does not say it.
[[nodiscard]] Expected<config::Config> resumed_config(config::Config config);

// Called by all ranks before the first step: lets the sources measure, on all ranks at once, as
// busy as the machine will be then, and takes what rank 0 has found into the config, where it is a
// value. `inputs` are opened anew if anything was measured; rank 0 tells it.
[[nodiscard]] Expected<void> measure_keys(transport::Transport& transport, TrainOptions& options,
                                          Inputs& inputs, const Reporter& reporter);

}  // namespace dynmo::train
