// SPDX-License-Identifier: Apache-2.0
#pragma once

// A file that says which process works in a folder, and lets no second one in.
//
// The system's lock (flock) decides, so that a process that was killed holds nothing, on this boot
// or another. What stands in the file is for the one that is refused, and decides only where the
// file system has no locks.

#include <cstdint>
#include <filesystem>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/process/sockets.h"

namespace dynmo::process {

struct LockHolder {
  std::string host;
  std::string boot_id;
  std::int64_t pid = 0;
  std::int64_t start_ticks = 0;  // from boot to the start of the process; tells a number used again
  std::string since;             // for people
};

[[nodiscard]] LockHolder this_process();

// Whether the holder certainly runs no more: another boot of this host, or no such process on this
// boot.
[[nodiscard]] bool is_gone(const LockHolder& holder);

// Holds the lock until it is destroyed, which removes the file. Moved, not copied.
class FileLock {
 public:
  // Creates the file in its folder, which exists. kBadInput: another process holds it ("in use by
  // another run: process 4321 on HOST, since 2026-01-31 12:00:00 UTC"), or the file cannot be
  // created
  // ("cannot create 'FILE': Read-only file system").
  [[nodiscard]] static Expected<FileLock> take(const std::filesystem::path& path);

  FileLock(FileLock&&) noexcept = default;
  FileLock& operator=(FileLock&&) = delete;
  ~FileLock();

 private:
  FileLock(std::filesystem::path path, UniqueFd file)
      : path_(std::move(path)), file_(std::move(file)) {}

  std::filesystem::path path_;
  UniqueFd file_;
};

}  // namespace dynmo::process
