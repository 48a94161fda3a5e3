// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys of a run that are "auto", such as pruning.sparse_above. They are measured once, before the
// first step, and are numbers in the run's config from then on. So a resumed run has the same bits,
// whatever a clock would measure by then.

#include <string>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/train/setup/resolved_run.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Returns the numbers that a run to resume has measured, as settings. They are those of its config
// in run.directory, for keys of enabled sources that are "auto" in `config`. Returns kBadInput if
// that config cannot be read or lacks the numbers.
[[nodiscard]] Expected<std::vector<std::string>> measured_before(config::Config config);

// Lets the sources measure, before the first step. All ranks call it at once, so that the machine
// is as busy as in training. Sets the keys of the config to the values of rank 0, which prints what
// was measured.
[[nodiscard]] Expected<void> measure_keys(transport::Transport& transport, ResolvedRun& run,
                                          const Reporter& reporter);

}  // namespace dynmo::train
