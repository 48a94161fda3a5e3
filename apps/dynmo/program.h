// SPDX-License-Identifier: Apache-2.0
#pragma once

// Common code of the two programs of the command line. `dynmo` has the commands that need no
// libtorch, and starts at once. For the others it becomes `dynmo-runtime`, which loads libtorch.

#include <CLI/App.hpp>
#include <functional>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// Runs the body of main. Parses the flags of the commands that `add_commands` adds, runs the chosen
// one and returns the exit code. Prints every error as one line.
[[nodiscard]] int run_program(int argc, char** argv,
                              const std::function<void(CLI::App&, Command&)>& add_commands);

}  // namespace dynmo::app
