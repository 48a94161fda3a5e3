// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace dynmo::data {

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
