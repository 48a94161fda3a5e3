// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace dynmo {
namespace {

Error system_error(std::string_view what, const std::filesystem::path& path) {
  return make_error(ErrorCode::kBadInput, "cannot {} '{}': {}", what, path.string(),
                    std::strerror(errno));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { close_now(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int get() const { return fd_; }
  bool close_now() {
    const bool ok = fd_ < 0 || ::close(fd_) == 0;
    fd_ = -1;
    return ok;
  }

 private:
  int fd_;
};

bool write_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return true;
}

// Where there is nothing to be replaced.
Expected<void> write_in_place(const std::filesystem::path& path,
                              std::span<const std::span<const std::byte>> pieces) {
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (file.get() < 0) return system_error("open", path);
  for (const auto piece : pieces) {
    if (!write_all(file.get(), piece)) return system_error("write", path);
  }
  return file.close_now() ? Expected<void>() : system_error("write", path);
}

}  // namespace

Expected<std::string> read_file(const std::filesystem::path& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return system_error("open", path);
  std::string text;
  std::array<char, 65536> buffer;
  while (true) {
    const ssize_t got = ::read(file.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_error("read", path);
    if (got == 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(got));
  }
}

Expected<void> write_file_durably(const std::filesystem::path& given,
                                  std::span<const std::span<const std::byte>> pieces) {
  std::error_code fault;
  const auto kind = std::filesystem::status(given, fault).type();
  using Type = std::filesystem::file_type;
  if (kind == Type::directory) {
    return make_error(ErrorCode::kBadInput, "cannot write '{}': it is a folder; name a file in it",
                      given.string());
  }
  if (kind != Type::regular && kind != Type::not_found) {  // a pipe, a terminal, /dev/null
    return write_in_place(given, pieces);
  }
  // Behind a link the file is replaced, not the link. The name beside it is this process's own.
  const std::filesystem::path path =
      kind == Type::regular ? std::filesystem::canonical(given, fault) : given;
  const std::filesystem::path fresh = fmt::format("{}.{}.new", path.string(), ::getpid());
  Descriptor file(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file.get() < 0) return system_error("create", fresh);
  bool ok = true;
  for (const auto piece : pieces) ok = ok && write_all(file.get(), piece);
  ok = ok && ::fsync(file.get()) == 0;
  ok = file.close_now() && ok;
  if (!ok || ::rename(fresh.c_str(), path.c_str()) != 0) {
    const Error error = system_error("write", path);
    ::unlink(fresh.c_str());
    return error;
  }
  return sync_directory(path.parent_path().empty() ? std::filesystem::path(".")
                                                   : path.parent_path());
}

Expected<void> write_file_durably(const std::filesystem::path& path, std::string_view text) {
  const std::array pieces = {std::as_bytes(std::span(text))};
  return write_file_durably(path, pieces);
}

Expected<void> sync_directory(const std::filesystem::path& path) {
  const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) return system_error("open folder", path);
  if (::fsync(folder.get()) != 0) return system_error("sync folder", path);
  return {};
}

Expected<void> make_directories(const std::filesystem::path& path) {
  std::error_code fault;
  std::filesystem::create_directories(path, fault);
  if (fault) {
    return make_error(ErrorCode::kBadInput, "cannot make folder '{}': {}", path.string(),
                      fault.message());
  }
  return {};
}

}  // namespace dynmo
