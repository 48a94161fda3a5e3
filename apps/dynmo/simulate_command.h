// SPDX-License-Identifier: Apache-2.0
#pragma once

// `dynmo simulate SCENARIO.toml`: policies compared over a whole training run, without a GPU.

#include "apps/dynmo/command.h"

namespace CLI {
class App;
}

namespace dynmo::app {

void add_simulate_command(CLI::App& app, Command& chosen);

}  // namespace dynmo::app
