// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>

#include "apps/dynmo/command.h"

namespace dynmo::app {

// `dynmo trace stats` and `dynmo trace gen`: features of loads, and loads of given features.
void add_features_commands(CLI::App& trace, Command& chosen);

}  // namespace dynmo::app
