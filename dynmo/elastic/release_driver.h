// SPDX-License-Identifier: Apache-2.0
#pragma once

// Calls the hooks of releases (release.h) during a training, at the leader of a run. It starts the
// processes and reads the clock; release.h does neither.
//
//   release(ended, kept)   after a change of generation that left ranks out, once they have ended
//   set_running(ranks)     after a change in which ranks joined or were lost
//   poll()                 at every step boundary; does not block
//   limit_hook(longest)    before another process calls the hooks, until runs_hook() is false
//   finish(at_most)        when the run ends
//
// Every result of a hook, including hangs and failures, becomes a line for the user.

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/elastic/release.h"
#include "dynmo/process/hook.h"

namespace dynmo::elastic {

struct ReleaseOptions {
  std::string command = {};                  // elastic.release_command; empty: no hook
  std::chrono::milliseconds timeout{60000};  // elastic.release_timeout_s, of one call
  std::string run = {};                      // DYNMO_RUN
  HookRetries retries = {};
};

// The outcome of a release, or of one call of its hook.
struct ReleaseNews {
  ReleaseOutcome outcome = ReleaseOutcome::kDone;
  Release release;
  std::string line;  // ASCII, without a line end
};

enum class Hooks { kCall, kHold };

// Runs the hooks. One thread uses it.
class ReleaseDriver {
 public:
  explicit ReleaseDriver(ReleaseOptions options);

  // Adds a release of ranks that have ended, while the `kept` ones continue. The next poll() calls
  // the hook. Requires at least one ended rank, and none in both lists.
  void release(std::vector<Member> ended, std::vector<Member> kept);
  void set_running(std::vector<Member> ranks);

  // Returns the news of the hook that runs. With kHold it calls no other one.
  [[nodiscard]] std::vector<ReleaseNews> poll(Hooks next = Hooks::kCall);
  // Calls the hooks of releases that have had no call yet, one after another. Parks releases that
  // wait for another call. Stops, and stops the current hook, when `at_most` has passed or `hurry`,
  // called at intervals, returns true.
  [[nodiscard]] std::vector<ReleaseNews> finish(std::chrono::milliseconds at_most,
                                                const std::function<bool()>& hurry = {});

  [[nodiscard]] bool runs_hook() const { return runner_.is_running(); }
  // Stops a hook that has run for `longest`. Its release is parked when poll() returns its end.
  void limit_hook(std::chrono::milliseconds longest);

  // Makes the parked releases wait for a call of their hooks again. Returns their number.
  int try_again() { return releases_.try_again(std::chrono::steady_clock::now()); }
  // Returns the open releases for another leader. The hook that runs stays with this one.
  [[nodiscard]] Releases::Open open() const { return releases_.open(); }
  void forget_open() { releases_.forget_open(); }
  void take_over(Releases::Open open) { releases_.take_over(std::move(open)); }

  // Returns whether no hook runs, and none will without another release().
  [[nodiscard]] bool is_idle() const { return releases_.is_idle(); }
  [[nodiscard]] const std::vector<Release>& parked() const { return releases_.parked(); }

 private:
  void call_next(std::vector<ReleaseNews>& news);
  void note(const process::HookResult& result, std::vector<ReleaseNews>& news);

  ReleaseOptions options_;
  Releases releases_;
  std::optional<Release> current_;  // release whose hook runs
  Releases::Time called_ = {};      // time of that call
  process::HookRunner runner_;
};

}  // namespace dynmo::elastic
