// SPDX-License-Identifier: Apache-2.0
#pragma once

// Freezing in real training. The layers of a prefix stop training, by FreezingSchedule or by
// ConvergenceRule.

#include <cstdint>
#include <memory>

#include "dynmo/dynamism/freezing/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Makes the source for a run of `steps` steps. Requires valid options of a rule that a training
// supports.
[[nodiscard]] std::unique_ptr<Source> make_freezing_source(const FreezingOptions& options,
                                                           std::int64_t steps);

}  // namespace dynmo::dynamism
