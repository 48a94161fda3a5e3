// SPDX-License-Identifier: Apache-2.0
#pragma once

// Calls that file systems do not all offer (CIFS, FUSE, 9p, overlays), and what is done in their
// place: a run goes on with a weaker guarantee, and a line says once which.

#include <filesystem>
#include <string_view>

namespace dynmo {

// Returns whether this errno of a call on a file says that the file system does not offer the call,
// rather than that the disk is full, damaged or away.
[[nodiscard]] bool is_not_offered(int error);

// Syncs an open file or folder. True too where the file system cannot; false with errno.
[[nodiscard]] bool sync_open(int descriptor, const std::filesystem::path& path);

// Renames over the file that may have the name. If the file system refuses that, the older file is
// moved out of the way first; anything but a file stays. Returns false with errno; the older file
// is then unchanged.
[[nodiscard]] bool rename_over(const std::filesystem::path& from, const std::filesystem::path& to);

// Says once in a process what a file system does not offer. `what` is a text of its own for each
// call, "a folder cannot be synced"; `then` is what follows for the user.
void note_not_offered(std::string_view what, int error, std::string_view then,
                      const std::filesystem::path& path);

// Shows such a line to the user; until a program sets one, nobody is told. Libraries print nothing.
using ShowNote = void (*)(std::string_view line);
void show_notes_by(ShowNote show);

}  // namespace dynmo
