// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the subcommands plug into main: each `add_..._command(app, chosen)` adds its options to
// `app`, and its callback sets `chosen` while CLI11 parses; main runs it afterwards. Nothing is
// done while flags are still being read, and main alone turns errors into messages and exit codes.

#include <functional>

#include "dynmo/core/expected.h"

namespace dynmo::app {

// Runs a command whose flags are parsed: its exit code (DESIGN: 0 done, 130 interrupted, ...), or
// the error that main prints.
using Command = std::function<Expected<int>()>;

}  // namespace dynmo::app
