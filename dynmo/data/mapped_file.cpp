// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "dynmo/core/file_system.h"

namespace dynmo::data {
namespace {

// Reads a file, which cannot be mapped, into anonymous memory. Returns MAP_FAILED with errno after
// an error.
void* read_whole(int file, std::size_t size, const std::filesystem::path& path) {
  const int refused = errno;
  void* start = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return start;
  std::size_t done = 0;
  while (done < size) {
    const ssize_t got = ::read(file, static_cast<std::byte*>(start) + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      const int error = got < 0 ? errno : EIO;  // it has shrunk
      ::munmap(start, size);
      errno = error;
      return MAP_FAILED;
    }
    done += static_cast<std::size_t>(got);
  }
  note_not_offered("this file system cannot map a file", refused,
                   "files are read into memory, which takes as much as they have", path);
  return start;
}

}  // namespace

Expected<std::shared_ptr<const MappedFile>> MappedFile::open(const std::filesystem::path& path) {
  const auto fault = [&](const char* why) {
    return make_error(ErrorCode::kBadInput, "cannot map '{}': {}", path.string(), why);
  };
  // O_NONBLOCK: a named pipe is refused below instead of waiting for its writer.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return fault(std::strerror(errno));
  struct stat status {};
  if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(file);
    return fault("not a regular file");
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  void* start = nullptr;
  if (size > 0) start = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
  if (start == MAP_FAILED && is_not_offered(errno)) start = read_whole(file, size, path);
  const int reason = errno;
  ::close(file);
  if (start == MAP_FAILED) return fault(std::strerror(reason));
  const std::span bytes(static_cast<const std::byte*>(start), size);
  return std::shared_ptr<const MappedFile>(new MappedFile(bytes));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace dynmo::data
