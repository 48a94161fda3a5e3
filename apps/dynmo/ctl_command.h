// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// Adds `dynmo ctl`, which queries and controls an active run (docs/elasticity.md).
void add_ctl_command(CLI::App& app, Command& chosen);

}  // namespace dynmo::app
