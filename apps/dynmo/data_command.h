// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// Adds `dynmo data prepare PATH... --out DIR`.
void add_data_command(CLI::App& app, Command& chosen);

}  // namespace dynmo::app
