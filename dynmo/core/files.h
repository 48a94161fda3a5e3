// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whole files in and out, durable where a crash must not leave a half-written one.

#include <cstddef>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo {

// All that a file or a pipe holds. kBadInput, naming the path and the system's reason; also as soon
// as there are more than `max_bytes`, so that an endless device does not fill the memory.
[[nodiscard]] Expected<std::string> read_file(
    const std::filesystem::path& path,
    std::size_t max_bytes = std::numeric_limits<std::size_t>::max());

// Writes the pieces to a new file in the folder of `path`, fsyncs, renames over `path`, fsyncs the
// folder: after a crash the file is the old one or the new one, but for what the file system does
// not offer (file_system.h). A pipe or a device is written into;
// so is a descriptor of this process that the path names (/dev/stdout, /dev/fd/3), whatever it is.
[[nodiscard]] Expected<void> write_file_durably(const std::filesystem::path& path,
                                                std::span<const std::span<const std::byte>> pieces);
[[nodiscard]] Expected<void> write_file_durably(const std::filesystem::path& path,
                                                std::string_view text);

// Makes the entries of a folder durable (after a rename in it).
[[nodiscard]] Expected<void> sync_directory(const std::filesystem::path& path);

// Whether both paths are one file, or would be one if they were made. No for devices and pipes:
// those may be written twice.
[[nodiscard]] bool is_same_file(const std::filesystem::path& a, const std::filesystem::path& b);

// Cuts a file of lines behind its last newline: a crash may have left half a line, which no other
// is to be joined to. Nothing where there is no such file.
[[nodiscard]] Expected<void> cut_torn_line(const std::filesystem::path& path);

[[nodiscard]] Expected<void> make_directories(const std::filesystem::path& path);

}  // namespace dynmo
