// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// Adds `dynmo trace import TRACE.json --out PROFILE.json`.
void add_trace_command(CLI::App& app, Command& chosen);

}  // namespace dynmo::app
