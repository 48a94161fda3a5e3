// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace dynmo::process {

Expected<AppendFile> AppendFile::open(const std::filesystem::path& path, Start start,
                                      std::string_view what) {
  const int flags =
      O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (start == Start::kEmpty ? O_TRUNC : 0);
  // Opening a pipe would wait for a reader, which may never come.
  UniqueFd file(::open(path.c_str(), flags | O_NONBLOCK, 0666));
  struct stat status {};
  const bool opened = file && ::fcntl(file.get(), F_SETFL, flags & O_APPEND) == 0 &&
                      ::fstat(file.get(), &status) == 0;
  AppendFile made(path, what, std::move(file), status.st_size);
  if (!opened) return made.error("open");
  return made;
}

Expected<void> AppendFile::append(std::string_view piece) {
  std::string_view left = piece;
  while (!left.empty()) {
    const ssize_t written = ::write(file_.get(), left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      if (written == 0) errno = ENOSPC;
      const Error why = error("write");
      (void)!::ftruncate(file_.get(), size_);
      return why;
    }
    left.remove_prefix(static_cast<std::size_t>(written));
  }
  size_ += static_cast<std::int64_t>(piece.size());
  return {};
}

Expected<void> AppendFile::close() {
  if (!file_ || ::close(file_.release()) == 0) return {};
  return error("close");
}

Error AppendFile::error(std::string_view verb) const {
  return make_error(ErrorCode::kBadInput, "cannot {} {} '{}': {}", verb, what_, path_.string(),
                    std::strerror(errno));
}

}  // namespace dynmo::process
