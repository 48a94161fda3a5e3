// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// `dynmo ctl`: asks and commands a run that goes on (docs/elasticity.md).
void add_ctl_command(CLI::App& app, Command& chosen);

}  // namespace dynmo::app
