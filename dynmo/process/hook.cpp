// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/hook.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <string_view>
#include <thread>

#include "dynmo/core/check.h"
#include "dynmo/process/late_ranks.h"
#include "dynmo/process/signals_blocked.h"
#include "dynmo/process/sockets.h"
#include "dynmo/process/spawn_impl.h"

namespace dynmo::process {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kHookPoll{20};      // if the kernel has no pidfd
constexpr milliseconds kUnkillable{5000};  // after SIGKILL, if a dead file system blocks it
constexpr std::size_t kLineBytes = 200;

// The values that stop() and the destructor write to a hook's eventfd. The thread reads their sum.
constexpr std::uint64_t kAskToEnd = 1;
constexpr std::uint64_t kKillNow = 1U << 16;

// The two objects of posix_spawn. If one of these calls lacks memory, the start fails, too.
struct SpawnSetup {
  explicit SpawnSetup(int output) {
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    // The pipe comes first: it may have a number from 0 to 2 if this process has closed those.
    posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, output, STDERR_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    // Libraries open descriptors that exec does not close.
    posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
    sigset_t all, none;
    sigfillset(&all);
    sigemptyset(&none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(
        &attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
  }
  SpawnSetup(const SpawnSetup&) = delete;
  SpawnSetup& operator=(const SpawnSetup&) = delete;
  ~SpawnSetup() {
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
  }

  posix_spawn_file_actions_t actions{};
  posix_spawnattr_t attributes{};
};

HookResult not_started(std::string reason) {
  return {.end = HookEnd::kNotStarted, .exit_code = -1, .reason = std::move(reason), .output = {}};
}

}  // namespace

// A hook and the thread that watches it. Only the thread knows the process. The caller and the
// thread share `wake_` and `result_`.
class HookRunner::Hook {
 public:
  explicit Hook(HookCall call)
      : call_(std::move(call)), environment_(environment_with(call_.environment)) {
    wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) {
      result_ = not_started(
          fmt::format("cannot start '{}': {}", call_.command.front(), system_reason(errno)));
      return;
    }
    const SignalsBlocked for_the_thread;
    try {
      thread_ = std::thread([this] { run_guarded(); });
    } catch (const std::exception& error) {
      result_ =
          not_started(fmt::format("cannot start '{}': {}", call_.command.front(), error.what()));
    }
  }
  Hook(const Hook&) = delete;
  Hook& operator=(const Hook&) = delete;
  ~Hook() {
    ask(kKillNow);
    if (thread_.joinable()) thread_.join();
  }

  void ask(std::uint64_t what) {
    if (wake_) (void)!write(wake_.get(), &what, sizeof what);
  }
  std::optional<HookResult> wait(milliseconds at_most) {
    std::unique_lock lock(mutex_);
    if (at_most.count() > 0) ended_.wait_for(lock, at_most, [this] { return result_.has_value(); });
    return result_;
  }

 private:
  // The output of the hook. Only the last bytes are kept.
  struct Output {
    UniqueFd end;
    std::string tail = {};

    // Reads the available output, but at most a few times what a pipe holds. A hook that prints
    // without end must not outlast its limit.
    void read_present() {
      std::array<char, 1 << 14> bytes;
      for (int more = 64; more > 0 && end; --more) {
        const ssize_t got = read(end.get(), bytes.data(), bytes.size());
        if (got < 0) return;  // nothing is there; no EINTR, because all signals are blocked
        if (got == 0) end.reset();
        tail.append(bytes.data(), static_cast<std::size_t>(got));
        if (tail.size() > kHookOutput) tail.erase(0, tail.size() - kHookOutput);
      }
    }
  };

  void run_guarded() {
    HookResult result;
    try {
      result = run();
    } catch (const std::exception& error) {
      result = not_started(fmt::format("'{}': {}", call_.command.front(), error.what()));
    }
    const std::scoped_lock lock(mutex_);
    result_ = std::move(result);
    ended_.notify_all();
  }

  HookResult run();
  std::optional<std::string> start();  // returns the reason of a failure
  bool has_ended();
  void wait_for_events();
  void obey();
  void terminate(HookEnd why);
  void kill_now();
  [[nodiscard]] HookResult result_of_end() const;

  const HookCall call_;
  const std::vector<std::string> environment_;
  UniqueFd wake_;

  // Used by the thread only.
  pid_t pid_ = -1;
  UniqueFd process_;  // readable once it has ended
  Output output_;
  struct Killing {
    std::optional<HookEnd> why = {};
    bool sent_kill = false;
    Clock::time_point deadline = {};  // of the next signal
  };
  Killing killing_;
  struct End {
    siginfo_t status = {};  // si_pid: 0 until it has ended
    bool taken = false;     // another part of the program has reaped it
  };
  End end_;

  std::mutex mutex_;
  std::condition_variable ended_;
  std::optional<HookResult> result_;  // guarded by mutex_
  std::thread thread_;
};

HookResult HookRunner::Hook::run() {
  if (const auto why = start()) return not_started(*why);
  killing_.deadline = Clock::now() + call_.limit;
  while (!has_ended()) {
    wait_for_events();
    output_.read_present();
    obey();
    if (Clock::now() < killing_.deadline) continue;
    if (killing_.sent_kill) break;  // a dead file system blocks the process
    if (killing_.why) {
      kill_now();
    } else {
      terminate(HookEnd::kTimedOut);
    }
  }
  if (!end_.taken) {
    kill(-pid_, SIGKILL);  // not reaped yet, so the number still names this group
    waitpid(pid_, nullptr, WNOHANG);
  }
  output_.read_present();
  return result_of_end();
}

std::optional<std::string> HookRunner::Hook::start() {
  const auto program = find_program(call_.command.front());
  if (!program) return program.error().message;
  const auto failed = [&](int error) {
    return fmt::format("cannot start '{}': {}", *program, system_reason(error));
  };
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return failed(errno);
  output_.end = UniqueFd(ends[0]);
  const UniqueFd to_output(ends[1]);
  // The flag is set at this end alone: the two ends of a pipe have flags of their own.
  fcntl(output_.end.get(), F_SETFL, O_NONBLOCK);

  const SpawnSetup setup(to_output.get());
  const std::vector<char*> command = c_strings(call_.command);
  const std::vector<char*> environment = c_strings(environment_);
  const int error = posix_spawn(&pid_, program->c_str(), &setup.actions, &setup.attributes,
                                command.data(), environment.data());
  if (error != 0) return failed(error);
  tell_launcher_hook(pid_);  // it ends with the run, also if this process is killed
  process_ = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  return {};
}

// Returns whether the process has ended. Does not reap it.
bool HookRunner::Hook::has_ended() {
  siginfo_t status{};
  if (waitid(P_PID, static_cast<id_t>(pid_), &status, WEXITED | WNOHANG | WNOWAIT) != 0) {
    end_.taken = errno == ECHILD;
    return end_.taken;
  }
  end_.status = status;
  return end_.status.si_pid != 0;
}

void HookRunner::Hook::wait_for_events() {
  const auto left = std::chrono::ceil<milliseconds>(killing_.deadline - Clock::now());
  auto at_most = std::clamp(left, milliseconds(0), milliseconds(std::chrono::hours(1)));
  if (!process_) at_most = std::min(at_most, kHookPoll);
  std::array<pollfd, 3> events = {{{.fd = wake_.get(), .events = POLLIN, .revents = 0},
                                   {.fd = process_.get(), .events = POLLIN, .revents = 0},
                                   {.fd = output_.end.get(), .events = POLLIN, .revents = 0}}};
  ::poll(events.data(), events.size(), static_cast<int>(at_most.count()));
}

// Does what stop() or the destructor has asked for.
void HookRunner::Hook::obey() {
  std::uint64_t asked = 0;
  if (read(wake_.get(), &asked, sizeof asked) != sizeof asked) return;
  if (asked >= kKillNow) {
    killing_.why = HookEnd::kStopped;
    kill_now();
  } else if (!killing_.why) {
    terminate(HookEnd::kStopped);
  }
}

void HookRunner::Hook::terminate(HookEnd why) {
  killing_.why = why;
  kill(-pid_, SIGTERM);
  kill(-pid_, SIGCONT);  // a stopped process gets SIGTERM only then
  killing_.deadline = Clock::now() + call_.grace;
}

void HookRunner::Hook::kill_now() {
  killing_.sent_kill = true;
  kill(-pid_, SIGKILL);
  killing_.deadline = Clock::now() + kUnkillable;
}

HookResult HookRunner::Hook::result_of_end() const {
  HookResult result;
  result.output = output_.tail;
  if (end_.status.si_pid != 0 && end_.status.si_code == CLD_EXITED) {
    // Also after SIGTERM: a hook that handles it has its own exit code.
    result.end = HookEnd::kExited;
    result.exit_code = end_.status.si_status;
    result.reason = fmt::format("it ended with exit code {}", result.exit_code);
  } else if (end_.taken) {
    result.end = HookEnd::kKilled;
    result.reason = "its exit code is unknown: something else in this process reaps all children";
  } else if (!killing_.why) {
    result.end = HookEnd::kKilled;
    result.reason = fmt::format("it was killed by signal {} ({})", end_.status.si_status,
                                strsignal(end_.status.si_status));
  } else {
    result.end = *killing_.why;
    result.reason = *killing_.why == HookEnd::kStopped
                        ? "it was stopped"
                        : fmt::format("it took longer than {} s and was stopped",
                                      std::chrono::duration<double>(call_.limit).count());
    if (end_.status.si_pid == 0) result.reason += ", but does not end";
  }
  return result;
}

std::string last_line(const HookResult& result) {
  std::string_view text = result.output;
  const auto is_blank = [](char c) { return static_cast<unsigned char>(c) <= ' '; };
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  text.remove_prefix(text.find_last_of("\r\n") + 1);  // npos + 1 is 0
  std::string line(text.substr(0, kLineBytes));
  // The output may be anything, and goes to logs and JSON.
  for (char& c : line) {
    if (c < ' ' || c > '~') c = is_blank(c) ? ' ' : '?';
  }
  return line;
}

Expected<void> check_program(const std::string& name) {
  DYNMO_ASSIGN(const std::string program, find_program(name));
  struct stat found {};
  if (stat(program.c_str(), &found) == 0 && S_ISDIR(found.st_mode)) {
    return make_error(ErrorCode::kBadInput, "'{}' is a folder, wanted a program", program);
  }
  if (access(program.c_str(), X_OK) == 0) return {};
  return make_error(ErrorCode::kBadInput, "'{}' cannot be run: {}", program, system_reason(errno));
}

HookRunner::HookRunner() = default;
HookRunner::~HookRunner() = default;

void HookRunner::start(HookCall call) {
  DYNMO_CHECK(!hook_, "one hook at a time, got a second");
  DYNMO_CHECK(!call.command.empty(), "a program to run, got none");
  hook_ = std::make_unique<Hook>(std::move(call));
}

std::optional<HookResult> HookRunner::poll() { return wait(milliseconds(0)); }

std::optional<HookResult> HookRunner::wait(milliseconds at_most) {
  if (!hook_) return {};
  auto result = hook_->wait(at_most);
  if (result) hook_.reset();
  return result;
}

void HookRunner::stop() {
  if (hook_) hook_->ask(kAskToEnd);
}

}  // namespace dynmo::process
