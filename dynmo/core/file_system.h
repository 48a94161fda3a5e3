// SPDX-License-Identifier: Apache-2.0
#pragma once

// Calls that some file systems do not offer (CIFS, FUSE, 9p, overlays), and their replacements. A
// run continues with a weaker guarantee, and one line names it.

#include <filesystem>
#include <string_view>

namespace dynmo {

// Returns whether this errno of a call on a file means that the file system does not offer the
// call. Other errors mean that the disk is full, damaged or absent.
[[nodiscard]] bool is_not_offered(int error);

// Syncs an open file or folder. Returns true also if the file system cannot sync, and false with
// errno after an error.
[[nodiscard]] bool sync_open(int descriptor, const std::filesystem::path& path);

// Renames a file, and replaces a file that has the new name. If the file system cannot replace,
// moves the older file out of the way first. Returns false with errno after an error. Then whatever
// has the new name is unchanged.
[[nodiscard]] bool rename_over(const std::filesystem::path& from, const std::filesystem::path& to);

// Reports once in a process for each `what` that a file system does not offer a call. `what` is the
// failure, "a folder cannot be synced". `then` is the consequence for the user.
void note_not_offered(std::string_view what, int error, std::string_view then,
                      const std::filesystem::path& path);

// Shows a line about a missing call to the user. Without a call of show_notes_by() no line is
// shown: libraries print nothing.
using ShowNote = void (*)(std::string_view line);
void show_notes_by(ShowNote show);

}  // namespace dynmo
