// SPDX-License-Identifier: Apache-2.0
// Preloaded into `dynmo train`, this kills a process in the middle of a checkpoint: before its
// KILL_AT_WRITE-th operation (open, write, fsync, rename) on a file of a checkpoint that is not
// committed yet, a path with "/checkpoints/" and ".tmp", or on one whose path has
// KILL_AT_PATH in it. So a test names the moment and need not find one. With KILL_ONCE, the path of
// a file that is not there, one process alone does this: it makes the file.
//
// A disk that hangs: while there is a file HANG_WHILE, the first thread that makes a file whose
// path matches the pattern HANG_AT_PATH waits. It makes HANG_WHILE.hung.
//
// A slow disk: each process, or only the one whose RANK is SLOW_RANK, waits SLOW_MS milliseconds
// before it opens a file whose path matches the pattern SLOW_AT_PATH.
//
// A count: each process adds its number and the path to the file OPENS for every file that it opens
// to read, and whose path matches the pattern OPENS_OF.
#include <dlfcn.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

bool is_pending(const char* path) {
  static const char* const wanted = std::getenv("KILL_AT_PATH");
  if (wanted != nullptr) return std::strstr(path, wanted) != nullptr;
  return std::strstr(path, "/checkpoints/") != nullptr && std::strstr(path, ".tmp") != nullptr;
}

bool is_pending(int descriptor) {
  char link[64];
  char path[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = ::readlink(link, path, sizeof path - 1);
  if (length <= 0) return false;
  path[length] = '\0';
  return is_pending(path);
}

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

void hang(const char* path) {
  static const auto real = next<int (*)(const char*, int, ...)>("open");
  static const char* const wanted = std::getenv("HANG_AT_PATH");
  static const char* const hangs = std::getenv("HANG_WHILE");
  if (wanted == nullptr || hangs == nullptr || ::fnmatch(wanted, path, 0) != 0) return;
  char mark[4096];
  std::snprintf(mark, sizeof mark, "%s.hung", hangs);
  const int made = real(mark, O_CREAT | O_EXCL | O_WRONLY, 0600);
  if (made < 0) return;
  ::close(made);
  while (::access(hangs, F_OK) == 0) ::usleep(1000);
}

void delay(const char* path) {
  static const char* const wanted = std::getenv("SLOW_AT_PATH");
  static const char* const time = std::getenv("SLOW_MS");
  static const char* const only = std::getenv("SLOW_RANK");
  static const char* const rank = std::getenv("RANK");
  if (wanted == nullptr || time == nullptr || ::fnmatch(wanted, path, 0) != 0) return;
  if (only != nullptr && (rank == nullptr || std::strcmp(only, rank) != 0)) return;
  ::usleep(1000 * static_cast<useconds_t>(std::atoi(time)));
}

void note_open(const char* path) {
  static const auto real = next<int (*)(const char*, int, ...)>("open");
  static const auto put = next<ssize_t (*)(int, const void*, std::size_t)>("write");
  static const char* const notes = std::getenv("OPENS");
  static const char* const wanted = std::getenv("OPENS_OF");
  if (notes == nullptr || wanted == nullptr || ::fnmatch(wanted, path, 0) != 0) return;
  char line[4096];
  const int length = std::snprintf(line, sizeof line, "%d %s\n", ::getpid(), path);
  const int file = real(notes, O_CREAT | O_APPEND | O_WRONLY, 0600);
  if (file < 0 || put(file, line, static_cast<std::size_t>(length)) != length) std::abort();
  ::close(file);
}

bool is_the_one() {
  static const auto real = next<int (*)(const char*, int, ...)>("open");
  static const char* const mark = std::getenv("KILL_ONCE");
  return mark == nullptr || real(mark, O_CREAT | O_EXCL | O_WRONLY, 0600) >= 0;
}

void count() {
  static std::atomic<int> operations{0};
  static const char* const kills = std::getenv("KILL_AT_WRITE");
  if (kills != nullptr && ++operations == std::atoi(kills) && is_the_one()) std::raise(SIGKILL);
}

// With EXIT_AT_SIGUSR2 a process that gets SIGUSR2 ends with 1.
[[gnu::constructor]] void exit_at_signal() {
  if (std::getenv("EXIT_AT_SIGUSR2") != nullptr) std::signal(SIGUSR2, [](int) { ::_exit(1); });
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  static const auto real = next<int (*)(const char*, int, ...)>("open");
  std::va_list arguments;
  va_start(arguments, flags);
  const int mode = (flags & O_CREAT) != 0 ? va_arg(arguments, int) : 0;
  va_end(arguments);
  if ((flags & O_CREAT) != 0 && is_pending(path)) count();
  if ((flags & O_CREAT) != 0) hang(path);
  delay(path);
  if ((flags & (O_CREAT | O_ACCMODE)) == O_RDONLY) note_open(path);
  return real(path, flags, mode);
}

ssize_t write(int descriptor, const void* bytes, std::size_t size) {
  static const auto real = next<ssize_t (*)(int, const void*, std::size_t)>("write");
  if (is_pending(descriptor)) count();
  return real(descriptor, bytes, size);
}

int fsync(int descriptor) {
  static const auto real = next<int (*)(int)>("fsync");
  if (is_pending(descriptor)) count();
  return real(descriptor);
}

int rename(const char* from, const char* to) noexcept {
  static const auto real = next<int (*)(const char*, const char*)>("rename");
  if (is_pending(from)) count();
  return real(from, to);
}

}  // extern "C"
