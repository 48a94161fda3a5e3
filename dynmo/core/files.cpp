// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>

#include "dynmo/core/file_system.h"
#include "dynmo/core/units.h"

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

Expected<void> write_pieces(int fd, std::span<const std::span<const std::byte>> pieces,
                            const std::filesystem::path& path) {
  for (const auto piece : pieces) {
    if (!write_all(fd, piece)) return system_error("write", path);
  }
  return {};
}

// Writes into what `path` names, a pipe or a device, without a rename.
Expected<void> write_in_place(const std::filesystem::path& path,
                              std::span<const std::span<const std::byte>> pieces) {
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (file.get() < 0) return system_error("open", path);
  DYNMO_TRY(write_pieces(file.get(), pieces, path));
  return file.close_now() ? Expected<void>() : system_error("write", path);
}

// Returns the open descriptor that a path names. Opening that name again would start at the file's
// beginning, over text that was printed there, and fail for a socket.
std::optional<int> named_descriptor(const std::filesystem::path& path) {
  const std::string name = path.string();
  if (name == "/dev/stdout") return STDOUT_FILENO;
  if (name == "/dev/stderr") return STDERR_FILENO;
  for (const std::string_view folder : {"/dev/fd/", "/proc/self/fd/"}) {
    if (!name.starts_with(folder)) continue;
    int number = -1;
    const char* end = name.data() + name.size();
    const auto [stop, fault] = std::from_chars(name.data() + folder.size(), end, number);
    if (fault == std::errc() && stop == end) return number;
  }
  return std::nullopt;
}

// Returns a name in the folder of `path` that no other process uses, short enough for the system.
std::filesystem::path fresh_name(const std::filesystem::path& path) {
  const std::string ending = fmt::format(".{}.new", ::getpid());
  const std::string name = path.filename().string();
  return path.parent_path() / (name.substr(0, NAME_MAX - ending.size()) + ending);
}

Expected<void> replace_file(const std::filesystem::path& path,
                            std::span<const std::span<const std::byte>> pieces) {
  const std::filesystem::path fresh = fresh_name(path);
  Descriptor file(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file.get() < 0) return system_error("create", path);
  bool ok = true;
  for (const auto piece : pieces) ok = ok && write_all(file.get(), piece);
  ok = ok && sync_open(file.get(), path);
  ok = file.close_now() && ok;
  if (!ok || !rename_over(fresh, path)) {
    const Error error = system_error("write", path);
    ::unlink(fresh.c_str());
    return error;
  }
  return sync_directory(path.parent_path().empty() ? std::filesystem::path(".")
                                                   : path.parent_path());
}

}  // namespace

Expected<std::string> read_file(const std::filesystem::path& path, std::size_t max_bytes) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return system_error("open", path);
  std::string text;
  std::array<char, 65536> buffer;
  while (true) {
    const ssize_t got = ::read(file.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_error("read", path);
    if (got == 0) return text;
    if (static_cast<std::size_t>(got) > max_bytes - text.size()) {
      return make_error(ErrorCode::kBadInput, "'{}' has more than {}, wanted a smaller file",
                        path.string(), format_bytes(Bytes{static_cast<std::int64_t>(max_bytes)}));
    }
    text.append(buffer.data(), static_cast<std::size_t>(got));
  }
}

Expected<void> write_file_durably(const std::filesystem::path& path,
                                  std::span<const std::span<const std::byte>> pieces) {
  if (const auto descriptor = named_descriptor(path)) {
    return write_pieces(*descriptor, pieces, path);
  }
  std::error_code fault;
  const auto kind = std::filesystem::status(path, fault).type();
  using Type = std::filesystem::file_type;
  if (kind == Type::directory) {
    return make_error(ErrorCode::kBadInput, "cannot write '{}': it is a folder; name a file in it",
                      path.string());
  }
  if (kind == Type::not_found) return replace_file(path, pieces);
  if (kind != Type::regular) return write_in_place(path, pieces);  // a pipe, a terminal, /dev/null
  // The file that a link leads to is replaced, not the link.
  return replace_file(std::filesystem::canonical(path, fault), pieces);
}

Expected<void> write_file_durably(const std::filesystem::path& path, std::string_view text) {
  const std::array pieces = {std::as_bytes(std::span(text))};
  return write_file_durably(path, pieces);
}

Expected<void> sync_directory(const std::filesystem::path& path) {
  const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0 && is_not_offered(errno)) {  // it may be written to, but not read
    note_not_offered("a folder cannot be opened to sync it", errno,
                     "after a power cut the newest files may be missing", path);
    return {};
  }
  if (folder.get() < 0) return system_error("open folder", path);
  if (!sync_open(folder.get(), path)) return system_error("sync folder", path);
  return {};
}

bool is_same_file(const std::filesystem::path& a, const std::filesystem::path& b) {
  namespace fs = std::filesystem;
  std::error_code fault;
  const fs::file_status status = fs::status(a, fault);
  if (fs::exists(status) && !fs::is_regular_file(status)) return false;
  if (fs::equivalent(a, b, fault)) return true;
  const fs::path normal = fs::weakly_canonical(a, fault);
  return !fault && normal == fs::weakly_canonical(b, fault) && !fault;
}

Expected<void> cut_torn_line(const std::filesystem::path& path) {
  std::error_code fault;
  if (!std::filesystem::is_regular_file(path, fault)) return {};
  std::ifstream file(path, std::ios::binary);
  if (file.seekg(-1, std::ios::end) && file.get() == '\n') return {};
  DYNMO_ASSIGN(const std::string text, read_file(path));
  const std::size_t whole = text.rfind('\n') + 1;  // no newline: npos + 1 is 0
  std::filesystem::resize_file(path, whole, fault);
  if (fault && is_not_offered(fault.value())) {
    return write_file_durably(path, std::string_view(text).substr(0, whole));
  }
  if (fault) {
    return make_error(ErrorCode::kBadInput, "cannot cut half a line off '{}': {}", path.string(),
                      fault.message());
  }
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

std::filesystem::path cache_folder() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::filesystem::path(value == nullptr ? "" : value);
  };
  std::filesystem::path cache = variable("DYNMO_CACHE");
  if (cache.empty()) cache = variable("XDG_CACHE_HOME") / "dynmo";
  return cache.is_absolute() ? cache : variable("HOME") / ".cache/dynmo";
}

namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view kGitLfs = "version https://git-lfs.github.com/spec/";

struct Content {
  std::string_view begin;
  std::string_view name;
};

constexpr std::array kContents = {
    Content{kGitLfs, "a Git LFS pointer, which stands for the file: get that by `git lfs pull`"},
    Content{"\x1f\x8b"sv, "compressed by gzip: decompress it first"},
    Content{"\x28\xb5\x2f\xfd"sv, "compressed by zstd: decompress it first"},
    Content{"BZh"sv, "compressed by bzip2: decompress it first"},
    Content{"\xfd"
            "7zXZ\0"sv,
            "compressed by xz: decompress it first"},
    Content{"PK\x03\x04"sv, "a zip archive, such as torch.save writes: wanted what is in it"},
    Content{"7z\xbc\xaf\x27\x1c"sv, "a 7z archive: wanted what is in it"},
    Content{"\x80\x02"sv, "a pickle, such as torch.save writes: wanted safetensors"},
    Content{"\x80\x03"sv, "a pickle of Python: wanted another format"},
    Content{"\x80\x04"sv, "a pickle of Python: wanted another format"},
    Content{"\x80\x05"sv, "a pickle of Python: wanted another format"},
    Content{"GGUF"sv, "a GGUF file: wanted safetensors"},
    Content{"\x89HDF"sv, "an HDF5 file: wanted another format"},
    Content{"\x93NUMPY"sv, "a NumPy file: wanted another format"},
    Content{"PAR1"sv, "a Parquet file: wanted JSON lines"},
    Content{"ARROW1"sv, "an Arrow file: wanted JSON lines"},
    Content{"%PDF-"sv, "a PDF: wanted its text"},
    Content{"\xff\xfe"sv, "UTF-16 text: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"},
    Content{"\xfe\xff"sv, "UTF-16 text: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"},
    Content{"<!DOCTYPE html"sv, "an HTML page, such as the answer to a download that failed"},
    Content{"<!doctype html"sv, "an HTML page, such as the answer to a download that failed"},
    Content{"<html"sv, "an HTML page, such as the answer to a download that failed"},
};

}  // namespace

std::string known_content(std::string_view bytes) {
  for (const Content& content : kContents) {
    if (bytes.starts_with(content.begin)) return std::string(content.name);
  }
  return "";
}

bool is_pointer_file(std::string_view bytes) { return bytes.starts_with(kGitLfs); }

}  // namespace dynmo
