// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory of this process and of the host, as the system counts it.

#include "dynmo/core/units.h"

namespace dynmo::process {

// Resident now; 0 where the system does not tell.
[[nodiscard]] Bytes resident_memory();

// Returns the memory of this host, with its swap; 0 where the system does not report it.
[[nodiscard]] Bytes host_memory();

// Returns what programs may still take on this host; 0 where the system does not report it.
[[nodiscard]] Bytes available_memory();

}  // namespace dynmo::process
