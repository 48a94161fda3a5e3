// SPDX-License-Identifier: Apache-2.0
#pragma once

// Words of commands that are printed for a user to paste.

#include <string>
#include <string_view>

namespace dynmo {

// Quotes a word for a POSIX shell. Returns it unchanged if it has no special characters, else in
// single quotes.
[[nodiscard]] std::string shell_quote(std::string_view word);

}  // namespace dynmo
