// SPDX-License-Identifier: Apache-2.0
#pragma once

// The facts of a build and its machine that a report of a defect needs: `dynmo --version --json`.

#include "dynmo/core/json.h"

namespace dynmo::app {

// Returns version, commit, compiler and libtorch of this build, and processor and system of this
// machine. A value that is not known is null.
[[nodiscard]] Json version_report();

}  // namespace dynmo::app
