// SPDX-License-Identifier: Apache-2.0
#pragma once

// Files that are something else than their names say: pointers of Git LFS, archives, pages of a
// failed download. An error of a reader names that instead of the byte at which it stumbled.

#include <string>
#include <string_view>

namespace dynmo {

// Returns what a file is by its first bytes, and what to do: "a Git LFS pointer: ..."; "" if they
// tell nothing.
[[nodiscard]] std::string known_content(std::string_view bytes);

// Returns whether the file stands for another one (a Git LFS pointer), although it is text.
[[nodiscard]] bool is_pointer_file(std::string_view bytes);

}  // namespace dynmo
