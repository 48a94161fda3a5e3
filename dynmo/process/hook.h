// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs a program of the user's beside a training, so that nothing that it does can disturb the run.
// For example, a hook returns hosts to the job manager.
//
// The program has its own process group, so Ctrl-C does not reach it. It has none of this process's
// descriptors, because an open connection would hide the loss of this rank. Its stdin is empty. The
// end of its output is kept.
//
// posix_spawn starts it, because that copies no page tables. A separate thread calls posix_spawn,
// so that a slow file system does not delay the caller. SIGCHLD and its handler are left alone.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::process {

struct HookCall {
  // Program and arguments. The program is looked up in PATH if it has no '/'.
  std::vector<std::string> command = {};
  std::vector<std::pair<std::string, std::string>> environment = {};  // added to this process's
  std::chrono::milliseconds limit{60000};                             // then SIGTERM to its group
  std::chrono::milliseconds grace{2000};                              // then SIGKILL
};

enum class HookEnd {
  kExited,      // by itself
  kKilled,      // by another process's signal
  kTimedOut,    // killed after its limit
  kStopped,     // killed after stop()
  kNotStarted,  // no such program, no processes left, ...
};

struct HookResult {
  HookEnd end = HookEnd::kNotStarted;
  int exit_code = -1;       // kExited
  std::string reason = {};  // "it ended with exit code 3", "cannot start 'x': ..."
  std::string output = {};  // last kHookOutput bytes of stdout and stderr
};

inline constexpr std::size_t kHookOutput = 4096;

// Returns the last line of a hook's output that is not empty, at most 200 bytes. Control characters
// become spaces.
[[nodiscard]] std::string last_line(const HookResult& result);

// Checks whether this process could start the program. Returns kBadInput: "the program 'x' is not
// in PATH", "'/x/y' cannot be run: ...". Call it when a run begins, not when its first hook is due.
[[nodiscard]] Expected<void> check_program(const std::string& name);

// Runs one hook at a time. Processes that it has started in its group end with it. If this process
// is killed, the hook continues. If `dynmo train` has started this process, the hook ends with the
// run at the latest. One thread uses it.
class HookRunner {
 public:
  HookRunner();
  HookRunner(const HookRunner&) = delete;
  HookRunner& operator=(const HookRunner&) = delete;
  // Kills the hook that runs.
  ~HookRunner();

  // Starts a hook and returns at once. The result has any error. Requires that none runs.
  void start(HookCall call);
  // Returns true from start() until poll() or wait() has returned the result.
  [[nodiscard]] bool is_running() const { return hook_ != nullptr; }
  // Returns the result of a hook that has ended. Does not block.
  [[nodiscard]] std::optional<HookResult> poll();
  // Like poll(), and waits for the hook's end, for `at_most`.
  [[nodiscard]] std::optional<HookResult> wait(std::chrono::milliseconds at_most);
  // Stops the hook: SIGTERM now, SIGKILL after the grace. Does not block.
  void stop();

 private:
  class Hook;
  std::unique_ptr<Hook> hook_;
};

}  // namespace dynmo::process
