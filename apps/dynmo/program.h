// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two programs of the command line share this file. `dynmo` has the commands that need no
// libtorch, and starts at once; `dynmo-runtime`, which `dynmo` becomes for the others, loads
// libtorch.

#include <CLI/App.hpp>
#include <functional>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// The body of main: parses the flags of the commands that `add_commands` adds, runs the chosen one
// and returns the exit code. Prints every error, as one line.
[[nodiscard]] int run_program(int argc, char** argv,
                              const std::function<void(CLI::App&, Command&)>& add_commands);

}  // namespace dynmo::app
