// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// Adds `dynmo trace gen`: loads of given features.
void add_gen_command(CLI::App& trace, Command& chosen);

}  // namespace dynmo::app
