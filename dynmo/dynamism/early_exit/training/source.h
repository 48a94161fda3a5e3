// SPDX-License-Identifier: Apache-2.0
#pragma once

// Early exit in real training. Some blocks are followed by a separate head, where tokens whose
// prediction is sure leave (dynamism/early_exit/training/exit_layer.h). The threshold of confidence
// is fixed, or follows the counts of the last step. Then a scheduled share of the tokens stays.
// Every rank has the same counts. No token of a step affects which others leave in it.

#include <memory>

#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Makes the source. Requires valid options.
[[nodiscard]] std::unique_ptr<Source> make_early_exit_source(const EarlyExitOptions& options);

}  // namespace dynmo::dynamism
