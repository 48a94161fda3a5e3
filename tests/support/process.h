// SPDX-License-Identifier: Apache-2.0
#pragma once

// A process of a test and what it prints.

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace dynmo {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Whether a process of this number runs (one that has ended but was not reaped does not).
inline bool is_running(pid_t pid) {
  std::string path = fmt::format("/proc/{}/stat", pid);
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  char text[512] = {};
  const ssize_t got = read(file, text, sizeof text - 1);
  close(file);
  const std::string stat(text, got > 0 ? static_cast<std::size_t>(got) : 0);
  const std::size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && stat[name_end + 2] != 'Z';
}

using Environment = std::vector<std::pair<std::string, std::string>>;

class Process {
 public:
  // Runs a program.
  explicit Process(const std::vector<std::string>& command, const Environment& environment = {}) {
    start([&] {
      for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
      std::vector<char*> arguments;
      for (const std::string& one : command) arguments.push_back(const_cast<char*>(one.c_str()));
      arguments.push_back(nullptr);
      execv(arguments[0], arguments.data());
      return 127;
    });
  }
  // Runs a function in a copy of this process.
  explicit Process(const std::function<int()>& body) { start(body); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    if (running_) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(output_);
  }

  [[nodiscard]] pid_t pid() const { return pid_; }
  // stdout and stderr as they came.
  [[nodiscard]] const std::string& output() const { return text_; }

  // Reads until the output satisfies `enough`; false after `limit` or at its end.
  bool read_until(const std::function<bool(const std::string&)>& enough,
                  std::chrono::milliseconds limit = std::chrono::seconds(180)) {
    const auto deadline = Clock::now() + limit;
    while (!enough(text_)) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      if (left.count() <= 0) return false;
      pollfd wait{.fd = output_, .events = POLLIN, .revents = 0};
      if (poll(&wait, 1, static_cast<int>(left.count())) <= 0) continue;
      char bytes[4096];
      const ssize_t got = read(output_, bytes, sizeof bytes);
      if (got <= 0) return false;
      text_.append(bytes, static_cast<std::size_t>(got));
    }
    return true;
  }

  // Waits for its end: the exit code, or minus the signal. -1000 if it had to be killed.
  int wait(std::chrono::milliseconds limit = std::chrono::seconds(180)) {
    const auto deadline = Clock::now() + limit;
    read_until([](const std::string&) { return false; }, limit);
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      if (Clock::now() > deadline) {
        kill(pid_, SIGKILL);
        waitpid(pid_, &status, 0);
        status = -1;
        break;
      }
      usleep(1000);
    }
    running_ = false;
    if (status == -1) return -1000;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  void start(const std::function<int()>& body) {
    int ends[2] = {};
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    pid_ = fork();
    ASSERT_GE(pid_, 0);
    if (pid_ == 0) {
      dup2(ends[1], 1);
      dup2(ends[1], 2);
      _exit(body());
    }
    close(ends[1]);
    output_ = ends[0];
  }

  pid_t pid_ = -1;
  int output_ = -1;
  bool running_ = true;
  std::string text_;
};

}  // namespace dynmo
