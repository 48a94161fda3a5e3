// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory of this process and its host, as the system counts it.

#include "dynmo/core/units.h"

namespace dynmo::process {

// Returns the resident memory, or 0 if the system does not report it.
[[nodiscard]] Bytes resident_memory();

// Returns the memory of this host, with its swap, or 0 if the system does not report it.
[[nodiscard]] Bytes host_memory();

// Returns what programs may still take on this host, or 0 if the system does not report it.
[[nodiscard]] Bytes available_memory();

}  // namespace dynmo::process
