// SPDX-License-Identifier: Apache-2.0
#pragma once

// Early exit in real training: behind some blocks stands a head of its own, and tokens whose
// prediction is sure leave there (dynamism/early_exit/training/exit_layer.h). From which confidence
// on is fixed, or follows the counts of the step before, so that a scheduled share of the tokens
// stays: every rank has the same counts, and none of the step's own tokens changes what leaves.

#include <memory>

#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Requires valid options.
[[nodiscard]] std::unique_ptr<Source> make_early_exit_source(const EarlyExitOptions& options);

}  // namespace dynmo::dynamism
