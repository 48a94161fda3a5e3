// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads and writes whole files, durably if a crash must not leave a half-written one.

#include <cstddef>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo {

// Returns the content of a file or a pipe. Returns kBadInput with the path and the system's reason
// if it cannot be read. Also returns it beyond `max_bytes`, so that an endless device does not fill
// the memory.
[[nodiscard]] Expected<std::string> read_file(
    const std::filesystem::path& path,
    std::size_t max_bytes = std::numeric_limits<std::size_t>::max());

// Writes the pieces to a new file in the folder of `path`, and fsyncs it. Then renames it over
// `path` and fsyncs the folder. So a crash leaves the old file or the new one, unless the file
// system lacks a call (file_system.h). Fails with kBadInput.
//
// A pipe or a device is written into. So is a descriptor of this process that the path names
// (/dev/stdout, /dev/fd/3), whatever it is.
[[nodiscard]] Expected<void> write_file_durably(const std::filesystem::path& path,
                                                std::span<const std::span<const std::byte>> pieces);
[[nodiscard]] Expected<void> write_file_durably(const std::filesystem::path& path,
                                                std::string_view text);

// Makes the entries of a folder durable (after a rename in it). Fails with kBadInput.
[[nodiscard]] Expected<void> sync_directory(const std::filesystem::path& path);

// Returns whether both paths are one file, or would be one once created. Returns false for devices
// and pipes, which may be written twice.
[[nodiscard]] bool is_same_file(const std::filesystem::path& a, const std::filesystem::path& b);

// Truncates a file of lines behind its last newline. A crash may have left half a line, and the
// next line must not be joined to it. Does nothing if there is no such file. Fails with kBadInput.
[[nodiscard]] Expected<void> cut_torn_line(const std::filesystem::path& path);

[[nodiscard]] Expected<void> make_directories(const std::filesystem::path& path);

// Returns the folder for files that can be made again: DYNMO_CACHE, else XDG_CACHE_HOME/dynmo, else
// ~/.cache/dynmo. The script scripts/setup uses it, too.
[[nodiscard]] std::filesystem::path cache_folder();

// Returns the kind of a file by its first bytes, with a remedy: "a Git LFS pointer: ...". Returns
// "" if the bytes show none. Readers call it for files whose content contradicts their names:
// pointers, archives, pages of a failed download. Their error then names the content instead of the
// byte at which they failed.
[[nodiscard]] std::string known_content(std::string_view bytes);
// Returns whether the text is a placeholder for another file (a Git LFS pointer).
[[nodiscard]] bool is_pointer_file(std::string_view bytes);

}  // namespace dynmo
