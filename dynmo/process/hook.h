// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs a program of the user's beside a training, such as the hook that gives hosts back to the job
// manager, so that nothing that it does can disturb the run.
//
// It has a process group of its own, so that Ctrl-C does not reach it, and none of this process's
// descriptors, since a connection that it held open would hide the loss of this rank. Its stdin is
// empty; the end of what it prints is kept. It is started by posix_spawn, which copies no page
// tables, on a thread of its own: a slow file system holds that thread up and not the caller.
// SIGCHLD and its handler are left alone.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::process {

struct HookCall {
  std::vector<std::string> command = {};  // program and arguments; looked up in PATH if without '/'
  std::vector<std::pair<std::string, std::string>> environment = {};  // added to this process's
  std::chrono::milliseconds limit{60000};                             // then SIGTERM to its group
  std::chrono::milliseconds grace{2000};                              // then SIGKILL
};

enum class HookEnd {
  kExited,      // by itself
  kKilled,      // by a signal of somebody else's
  kTimedOut,    // killed after its limit
  kStopped,     // killed after stop()
  kNotStarted,  // no such program, no processes left, ...
};

struct HookResult {
  HookEnd end = HookEnd::kNotStarted;
  int exit_code = -1;       // kExited
  std::string reason = {};  // how it ended: "it ended with exit code 3", "cannot start 'x': ..."
  std::string output = {};  // the last kHookOutput bytes of its stdout and stderr, as they came
};

inline constexpr std::size_t kHookOutput = 4096;

// The last line of a hook's output that is not empty; control characters are spaces. At most 200
// bytes.
[[nodiscard]] std::string last_line(const HookResult& result);

// Whether this process could start it: kBadInput "the program 'x' is not in PATH", "'/x/y' cannot
// be run: ...". To be asked when a run begins, not when its first hook is due.
[[nodiscard]] Expected<void> check_program(const std::string& name);

// One hook at a time. What it has started in its group ends with it. Should this process be killed,
// the hook goes on to its own end, or to that of the run where `dynmo train` has started this
// process. One thread calls.
class HookRunner {
 public:
  HookRunner();
  HookRunner(const HookRunner&) = delete;
  HookRunner& operator=(const HookRunner&) = delete;
  // Kills the hook that runs.
  ~HookRunner();

  // Returns at once; whatever goes wrong is in the result. Requires that none runs.
  void start(HookCall call);
  // From start() until poll() or wait() has given the result.
  [[nodiscard]] bool is_running() const { return hook_ != nullptr; }
  // The result of a hook that has ended; does not block.
  [[nodiscard]] std::optional<HookResult> poll();
  // The same, but waits for its end, at most so long.
  [[nodiscard]] std::optional<HookResult> wait(std::chrono::milliseconds at_most);
  // Its time is over: SIGTERM now, SIGKILL after the grace. Does not block.
  void stop();

 private:
  class Hook;
  std::unique_ptr<Hook> hook_;
};

}  // namespace dynmo::process
