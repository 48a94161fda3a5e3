// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// Adds `dynmo config [FILE]`: the keys of a training, as a run saves them.
void add_config_command(CLI::App& app, Command& chosen);

}  // namespace dynmo::app
