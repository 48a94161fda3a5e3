// SPDX-License-Identifier: Apache-2.0
#pragma once

// Detects files whose content contradicts their names: pointers of Git LFS, archives, pages of a
// failed download. A reader's error then names the content instead of the byte at which it failed.

#include <string>
#include <string_view>

namespace dynmo {

// Returns the kind of a file by its first bytes, with a remedy: "a Git LFS pointer: ...". Returns
// "" if the bytes show none.
[[nodiscard]] std::string known_content(std::string_view bytes);

// Returns whether the text is a placeholder for another file (a Git LFS pointer).
[[nodiscard]] bool is_pointer_file(std::string_view bytes);

}  // namespace dynmo
