// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>
#include <string>
#include <vector>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// Adds `dynmo train`, which starts the ranks of a run, or is one of them. `arguments` is main's
// argv.
void add_train_command(CLI::App& app, const std::vector<std::string>& arguments, Command& chosen);

}  // namespace dynmo::app
