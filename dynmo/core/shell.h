// SPDX-License-Identifier: Apache-2.0
#pragma once

// Words of commands that are printed for a person to paste.

#include <string>
#include <string_view>

namespace dynmo {

// Returns a word as a POSIX shell reads it back: unchanged if nothing in it is special to a shell,
// else in single quotes.
[[nodiscard]] std::string shell_quote(std::string_view word);

}  // namespace dynmo
