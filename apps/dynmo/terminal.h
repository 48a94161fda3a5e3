// SPDX-License-Identifier: Apache-2.0
#pragma once

// What standard output can show.

namespace dynmo::app {

// Columns of the terminal, from 60 to 240; 100 where output goes elsewhere.
[[nodiscard]] int terminal_width();

// Whether the environment (LC_ALL, LC_CTYPE, LANG: the first that is set) says UTF-8.
[[nodiscard]] bool terminal_has_utf8();

}  // namespace dynmo::app
