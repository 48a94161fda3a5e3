// SPDX-License-Identifier: Apache-2.0
#pragma once

// Calls the hooks of releases (release.h) beside a training: what the leader of a run has. The one
// file of this folder that starts something and reads the clock.
//
//   release(ended, kept)   after a change of generation that left ranks out, once they have ended
//   set_running(ranks)     after one that ranks joined or were lost in
//   poll()                 at every step boundary; does not block
//   finish(at_most)        when the run ends
//
// Whatever a hook does, hangs and failures included, comes back as a line for people.

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
  std::string line;  // without a line end, ASCII
};

// One thread calls.
class ReleaseDriver {
 public:
  explicit ReleaseDriver(ReleaseOptions options);

  // These ranks have ended, those go on. The hook is called by the next poll(). Requires that at
  // least one has ended and none is in both.
  void release(std::vector<Member> ended, std::vector<Member> kept);
  void set_running(std::vector<Member> ranks);

  [[nodiscard]] std::vector<ReleaseNews> poll();
  // Each release that no hook was called for yet is called for, one after the other, until the time
  // is over or `hurry` is true, which is asked now and then; then the hook that runs is stopped.
  // What waits for another call is parked.
  [[nodiscard]] std::vector<ReleaseNews> finish(std::chrono::milliseconds at_most,
                                                const std::function<bool()>& hurry = {});

  // Those that are parked are called for again. Returns how many.
  int try_again() { return releases_.try_again(std::chrono::steady_clock::now()); }
  // For another leader; the hook that runs stays with this one.
  [[nodiscard]] Releases::Open open() const { return releases_.open(); }
  void forget_open() { releases_.forget_open(); }
  void take_over(Releases::Open open) { releases_.take_over(std::move(open)); }

  // No hook runs, and none will without another release().
  [[nodiscard]] bool is_idle() const { return releases_.is_idle(); }
  [[nodiscard]] const std::vector<Release>& parked() const { return releases_.parked(); }

 private:
  void call_next(std::vector<ReleaseNews>& news);
  void note(const process::HookResult& result, std::vector<ReleaseNews>& news);

  ReleaseOptions options_;
  Releases releases_;
  std::optional<Release> current_;  // whose hook runs
  process::HookRunner runner_;
};

}  // namespace dynmo::elastic
