// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory of this process as the system counts it.

#include "dynmo/core/units.h"

namespace dynmo::observe {

// Resident now; 0 where the system does not tell.
[[nodiscard]] Bytes resident_memory();

}  // namespace dynmo::observe
