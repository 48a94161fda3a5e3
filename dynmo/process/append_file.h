// SPDX-License-Identifier: Apache-2.0
#pragma once

// A file that only grows, by whole pieces. A piece that does not fit, as on a full disk, leaves no
// trace, so that a later one does not continue half of it.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "dynmo/core/expected.h"
#include "dynmo/process/sockets.h"

namespace dynmo::process {

// One thread at a time.
class AppendFile {
 public:
  enum class Start { kEmpty, kAppend };
  // Opens the file. Returns kBadInput with `what` ("step records"), the path and the system's
  // reason.
  [[nodiscard]] static Expected<AppendFile> open(const std::filesystem::path& path, Start start,
                                                 std::string_view what);

  // Appends all of the piece. Returns kBadInput with the reason if it cannot, and then the file is
  // as it was.
  [[nodiscard]] Expected<void> append(std::string_view piece);
  // Closes the file. A network's disk may report only now that it is full. Later calls do nothing.
  [[nodiscard]] Expected<void> close();

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  AppendFile(std::filesystem::path path, std::string_view what, UniqueFd file, std::int64_t size)
      : path_(std::move(path)), what_(what), file_(std::move(file)), size_(size) {}
  [[nodiscard]] Error error(std::string_view verb) const;

  std::filesystem::path path_;
  std::string what_;
  UniqueFd file_;
  std::int64_t size_;  // of the whole pieces
};

}  // namespace dynmo::process
