// SPDX-License-Identifier: Apache-2.0
#pragma once

// Freezing in real training: the layers of a growing prefix stop training, by FreezingSchedule.

#include <cstdint>
#include <memory>

#include "dynmo/dynamism/freezing/load_schedule.h"
#include "dynmo/dynamism/source.h"

namespace dynmo::dynamism {

// Requires a valid schedule.
[[nodiscard]] std::unique_ptr<Source> make_freezing_source(const FreezingSchedule& schedule,
                                                           std::int64_t steps);

// Of a config's table; sources.def asks for it.
[[nodiscard]] std::unique_ptr<Source> freezing_in_training(const SourceOptions& options,
                                                           std::int64_t steps);

}  // namespace dynmo::dynamism
