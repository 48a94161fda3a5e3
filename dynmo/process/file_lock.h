// SPDX-License-Identifier: Apache-2.0
#pragma once

// A file that names the process that works in a folder, and excludes a second one.
//
// The system's lock (flock) decides. So a process that was killed holds nothing, on this boot or
// another. The file's content is for the refused process. It decides only if the file system has no
// locks.

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
  // Ticks from boot to the start of the process, which detect a reused process id.
  std::int64_t start_ticks = 0;
  std::string since;  // for the user
};

[[nodiscard]] LockHolder this_process();

// Returns whether the holder has certainly ended: this host has booted again, or there is no such
// process.
[[nodiscard]] bool is_gone(const LockHolder& holder);

// Holds the lock until it is destroyed, which removes the file. Moved, not copied.
class FileLock {
 public:
  // Creates the file in its folder, which exists. Returns kBadInput if another process holds it
  // ("in use by another run: process 4321 on HOST, since 2026-01-31 12:00:00 UTC"). Also returns it
  // if the file cannot be created ("cannot create 'FILE': Read-only file system").
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
