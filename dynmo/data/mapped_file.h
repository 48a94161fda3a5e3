// SPDX-License-Identifier: Apache-2.0
#pragma once

// A file's bytes, mapped read-only, or read into memory if the file system cannot map. The mapping
// stays valid if the file is replaced by a rename, as our writers do, or unlinked. If a program
// truncates the file in place, reading behind the new end raises SIGBUS.

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

#include "dynmo/core/expected.h"

namespace dynmo::data {

// A file mapped into memory. Immutable, so any number of threads may read it.
class MappedFile {
 public:
  // Opens a regular file. Returns kBadInput with the path and the system's reason.
  [[nodiscard]] static Expected<std::shared_ptr<const MappedFile>> open(
      const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Returns the page-aligned bytes, or an empty span for an empty file.
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes_;
};

}  // namespace dynmo::data
