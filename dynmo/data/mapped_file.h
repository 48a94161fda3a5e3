// SPDX-License-Identifier: Apache-2.0
#pragma once

// A file's bytes, mapped read-only; read into memory where the file system maps none. The mapping
// stays valid when the file is renamed over or unlinked (as every writer of ours does), not when
// somebody truncates it in place: reading behind the new end is then a SIGBUS.

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

#include "dynmo/core/expected.h"

namespace dynmo::data {

// Immutable, so any number of threads may read it.
class MappedFile {
 public:
  // kBadInput, naming the path and the system's reason; also for what is not a regular file.
  [[nodiscard]] static Expected<std::shared_ptr<const MappedFile>> open(
      const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Page-aligned; empty for an empty file.
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes_;
};

}  // namespace dynmo::data
