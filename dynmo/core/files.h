// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whole files in and out, durable where a crash must not leave a half-written one.

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo {

// kBadInput, naming the path and the system's reason.
[[nodiscard]] Expected<std::string> read_file(const std::filesystem::path& path);

// Writes the pieces to `path`.new, fsyncs, renames over `path`, fsyncs the folder: after a crash
// the file is the old one or the new one.
[[nodiscard]] Expected<void> write_file_durably(const std::filesystem::path& path,
                                                std::span<const std::span<const std::byte>> pieces);
[[nodiscard]] Expected<void> write_file_durably(const std::filesystem::path& path,
                                                std::string_view text);

// Makes the entries of a folder durable (after a rename in it).
[[nodiscard]] Expected<void> sync_directory(const std::filesystem::path& path);

[[nodiscard]] Expected<void> make_directories(const std::filesystem::path& path);

}  // namespace dynmo
