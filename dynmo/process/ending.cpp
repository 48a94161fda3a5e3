// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/ending.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

namespace dynmo::process {
namespace {

namespace fs = std::filesystem;

constexpr unsigned kExiting = 0x4;  // PF_EXITING of the system's flags of a process
constexpr int kOfThread = O_EXCL;   // PIDFD_THREAD of pidfd_open(2)
constexpr std::uint64_t kKilled = std::uint64_t{1} << (SIGKILL - 1);

// Returns whether a SIGKILL is pending for the process's first thread. Then it runs no instruction
// outside the system any more.
bool is_killed(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    std::uint64_t pending = 0;
    if (words >> key >> std::hex >> pending && key == "SigPnd:") return (pending & kKilled) != 0;
  }
  return false;
}

}  // namespace

char state_of(pid_t pid) {
  const bool killed = is_killed(pid);  // first, because the end clears it
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  if (!std::getline(file, text)) return ' ';
  const std::size_t name_end = text.rfind(") ");
  if (name_end == std::string::npos) return ' ';
  std::istringstream fields(text.substr(name_end + 2));
  char state = ' ';
  std::int64_t ignored = 0;
  unsigned flags = 0;
  // Parent, group, session, terminal and its group come before the flags.
  fields >> state >> ignored >> ignored >> ignored >> ignored >> ignored >> flags;
  if (state == 'Z' || state == 'x') return 'X';
  return (flags & kExiting) != 0 || killed ? 'X' : state;
}

UniqueFd end_of_thread(pid_t pid, std::string_view name) {
  std::error_code fault;  // the process may end meanwhile
  const fs::directory_iterator end;
  for (fs::directory_iterator entry(fmt::format("/proc/{}/task", pid), fault);
       !fault && entry != end; entry.increment(fault)) {
    std::string found;
    std::ifstream file(entry->path() / "comm");
    if (!std::getline(file, found) || found != name) continue;
    const int thread = std::stoi(entry->path().filename());
    return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, thread, kOfThread)));
  }
  return {};
}

}  // namespace dynmo::process
