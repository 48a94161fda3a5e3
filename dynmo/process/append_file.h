// SPDX-License-Identifier: Apache-2.0
#pragma once

// A file that only grows, by whole pieces. A piece that does not fit, as on a full disk, leaves no
// trace, so that a later one does not continue half of it. Another process may append to the same
// file. Its pieces stay.

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "dynmo/core/expected.h"
#include "dynmo/process/sockets.h"

namespace dynmo::process {

// A file open for appending. Any thread may use it, one at a time.
class AppendFile {
 public:
  enum class Start { kEmpty, kAppend };
  // Opens the file. Returns kBadInput with `verb`, `what` ("step records", or "" for the path
  // alone), the path and the system's reason.
  [[nodiscard]] static Expected<AppendFile> open(const std::filesystem::path& path, Start start,
                                                 std::string_view what,
                                                 std::string_view verb = "open");

  // Appends all of the piece. Returns kBadInput with the reason if it cannot, and then the file has
  // no part of the piece. A part stays only if another process has appended behind it.
  [[nodiscard]] Expected<void> append(std::string_view piece);
  // Closes the file. A network's disk may report only now that it is full. Returns kBadInput then.
  // Later calls do nothing.
  [[nodiscard]] Expected<void> close();

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  AppendFile(std::filesystem::path path, std::string_view what, UniqueFd file)
      : path_(std::move(path)), what_(what), file_(std::move(file)) {}
  [[nodiscard]] Error error(std::string_view verb) const;

  std::filesystem::path path_;
  std::string what_;
  UniqueFd file_;
};

// A file of lines that a continued run appends to. After the first failure it gets no more lines.
// Any thread may use it, one at a time.
class LineFile {
 public:
  using Start = AppendFile::Start;  // kAppend first removes a half-written line
  // Opens the file. Returns kBadInput with `verb`, the path and the system's reason.
  [[nodiscard]] static Expected<LineFile> open(const std::filesystem::path& path, Start start,
                                               std::string_view verb = "write");

  // Appends whole lines. They are in the file when this returns. After a failure, every call
  // returns that first failure.
  [[nodiscard]] Expected<void> append(std::string_view lines);
  // Returns the first failure on the first call after it, else nullopt.
  [[nodiscard]] std::optional<Error> take_failure();
  // Closes the file. Returns the first failure.
  [[nodiscard]] Expected<void> close();

  [[nodiscard]] const std::filesystem::path& path() const { return file_.path(); }

 private:
  explicit LineFile(AppendFile file) : file_(std::move(file)) {}

  AppendFile file_;
  Expected<void> done_;  // or the first failure
  bool told_ = false;
};

}  // namespace dynmo::process
