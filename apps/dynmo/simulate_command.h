// SPDX-License-Identifier: Apache-2.0
#pragma once

// `dynmo simulate SCENARIO.toml` compares policies over a whole training run, without a GPU.

#include <CLI/App.hpp>

#include "apps/dynmo/command.h"

namespace dynmo::app {

void add_simulate_command(CLI::App& app, Command& chosen);

}  // namespace dynmo::app
