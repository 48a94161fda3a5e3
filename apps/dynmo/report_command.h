// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// Adds `dynmo report RUN`: the final report of a run, its layers and its traffic.
void add_report_command(CLI::App& app, Command& chosen);

}  // namespace dynmo::app
