// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string_view>

#include "dynmo/process/sockets.h"
#include "dynmo/process/spawn_impl.h"

extern char** environ;

namespace dynmo::process {
namespace {

// Prepares the child, in which only async-signal-safe calls are allowed. Returns false and sets
// errno on failure.
bool prepare(const ChildOptions& options, const cpu_set_t& core, pid_t parent) {
  setpgid(0, options.group);
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return false;
  if (getppid() != parent) _exit(127);  // the parent ended before PR_SET_PDEATHSIG
  if (options.core && sched_setaffinity(0, sizeof core, &core) != 0) return false;
  // Ranks are in the terminal's background, where `stty tostop` would stop them when they print.
  signal(SIGTTOU, SIG_IGN);
  // In jobs that a script starts with `&`, SIGINT is ignored. A forwarded one must end the ranks.
  signal(SIGINT, SIG_DFL);
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (nothing < 0 || dup2(nothing, STDIN_FILENO) < 0) return false;
  if (dup2(options.output, STDOUT_FILENO) < 0 || dup2(options.errors, STDERR_FILENO) < 0) {
    return false;
  }
  for (const int descriptor : options.inherited) {
    if (fcntl(descriptor, F_SETFD, 0) != 0) return false;
  }
  return sigprocmask(SIG_SETMASK, &options.signals, nullptr) == 0;
}

// Returns the errno that the child reports before its end, or 0 if it runs the program.
int read_failure(const UniqueFd& pipe) {
  int error = 0;
  ssize_t got = 0;
  do {
    got = read(pipe.get(), &error, sizeof error);
  } while (got < 0 && errno == EINTR);
  return got == sizeof error ? error : 0;
}

}  // namespace

Expected<std::string> find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "/usr/bin:/bin" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
    std::error_code fault;
    if (std::filesystem::is_directory(candidate, fault)) continue;
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return make_error(ErrorCode::kBadInput, "the program '{}' is not in PATH", name);
}

std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& set) {
  std::vector<std::string> result;
  for (char** one = environ; *one != nullptr; ++one) {
    const std::string_view variable = *one;
    const std::string_view name = variable.substr(0, variable.find('='));
    if (std::ranges::none_of(set, [name](const auto& ours) { return ours.first == name; })) {
      result.emplace_back(variable);
    }
  }
  for (const auto& [name, value] : set) result.push_back(fmt::format("{}={}", name, value));
  return result;
}

std::vector<char*> c_strings(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

Expected<pid_t> spawn(const ChildOptions& options) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) {
    return make_error(ErrorCode::kBadInput, "cannot make a pipe: {}", system_reason(errno));
  }
  const UniqueFd failure(ends[0]);
  UniqueFd report(ends[1]);
  const std::vector<char*> command = c_strings(options.command);
  const std::vector<char*> environment = c_strings(options.environment);
  cpu_set_t core;
  CPU_ZERO(&core);
  if (options.core) CPU_SET(static_cast<std::size_t>(*options.core), &core);
  const pid_t parent = getpid();

  const pid_t child = fork();
  if (child == 0) {
    if (prepare(options, core, parent)) {
      execve(options.program.c_str(), command.data(), environment.data());
    }
    const int error = errno;
    (void)!write(report.get(), &error, sizeof error);
    _exit(127);
  }
  if (child < 0) {
    return make_error(ErrorCode::kBadInput, "cannot start a process: {}", system_reason(errno));
  }
  setpgid(child, options.group);  // in both processes, because either may run first
  report.reset();
  const int error = read_failure(failure);
  if (error == 0) return child;
  waitpid(child, nullptr, 0);
  return make_error(ErrorCode::kBadInput, "cannot start '{}': {}", options.program,
                    system_reason(error));
}

}  // namespace dynmo::process
