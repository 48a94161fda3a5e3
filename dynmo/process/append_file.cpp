// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "dynmo/core/files.h"

namespace dynmo::process {

namespace {

// Removes the last `written` bytes, which were appended at `begin`, unless another process has
// appended between or behind them.
void take_back(int file, off_t begin, off_t written) {
  struct stat status {};
  if (written == 0 || ::fstat(file, &status) != 0) return;
  if (::lseek(file, 0, SEEK_CUR) != begin + written || status.st_size != begin + written) return;
  (void)!::ftruncate(file, begin);
}

}  // namespace

Expected<AppendFile> AppendFile::open(const std::filesystem::path& path, Start start,
                                      std::string_view what, std::string_view verb) {
  const int flags =
      O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (start == Start::kEmpty ? O_TRUNC : 0);
  // Non-blocking, because opening a pipe would wait for a reader, which may never come.
  UniqueFd file(::open(path.c_str(), flags | O_NONBLOCK, 0666));
  const bool opened = file && ::fcntl(file.get(), F_SETFL, flags & O_APPEND) == 0;
  AppendFile made(path, what, std::move(file));
  if (!opened) return made.error(verb);
  return made;
}

Expected<void> AppendFile::append(std::string_view piece) {
  std::string_view left = piece;
  off_t begin = 0;
  while (!left.empty()) {
    const ssize_t written = ::write(file_.get(), left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      if (written == 0) errno = ENOSPC;
      const Error why = error("write");
      take_back(file_.get(), begin, static_cast<off_t>(piece.size() - left.size()));
      return why;
    }
    // With O_APPEND the offset is known only after the first write.
    if (left.size() == piece.size()) begin = ::lseek(file_.get(), 0, SEEK_CUR) - written;
    left.remove_prefix(static_cast<std::size_t>(written));
  }
  return {};
}

Expected<void> AppendFile::close() {
  if (!file_ || ::close(file_.release()) == 0) return {};
  return error("close");
}

Error AppendFile::error(std::string_view verb) const {
  return make_error(ErrorCode::kBadInput, "cannot {} {}{}'{}': {}", verb, what_,
                    what_.empty() ? "" : " ", path_.string(), std::strerror(errno));
}

Expected<LineFile> LineFile::open(const std::filesystem::path& path, Start start,
                                  std::string_view verb) {
  if (start == Start::kAppend) DYNMO_TRY(cut_torn_line(path));
  DYNMO_ASSIGN(AppendFile file, AppendFile::open(path, start, "", verb));
  return LineFile(std::move(file));
}

Expected<void> LineFile::append(std::string_view lines) {
  if (done_) done_ = file_.append(lines);
  return done_;
}

std::optional<Error> LineFile::take_failure() {
  if (done_ || std::exchange(told_, true)) return std::nullopt;
  return done_.error();
}

Expected<void> LineFile::close() {
  const Expected<void> closed = file_.close();
  if (done_) done_ = closed;
  return done_;
}

}  // namespace dynmo::process
