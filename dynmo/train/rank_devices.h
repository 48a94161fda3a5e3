// SPDX-License-Identifier: Apache-2.0
#pragma once

// The channels between the devices of a run's ranks. Each group connects its own when it forms
// (docs/decisions/042-channels-of-a-generation.md).

#include "dynmo/train/c10d_groups.h"
#include "dynmo/train/setup/resolved_run.h"

namespace dynmo::train {

// Returns how the groups of a rank connect their devices, for C10dGroups::join(). It is empty on
// CPUs. The device of `options` is open.
[[nodiscard]] C10dGroups::Connect connects_devices(const ValidOptions& options);

// Lets the run use the channels that its groups have connected. `groups` outlives the run.
void use_devices_of(const C10dGroups& groups, ValidOptions& options);

}  // namespace dynmo::train
