// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// `dynmo report RUN`: what a run said at its end, its layers, its traffic. `chosen` gets it.
void add_report_command(CLI::App& app, Command& chosen);

}  // namespace dynmo::app
