// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// Adds `dynmo plan (PROFILE.json | --model CONFIG.json ...) (--ranks N | --cluster CLUSTER.json)`.
void add_plan_command(CLI::App& app, Command& chosen);

}  // namespace dynmo::app
