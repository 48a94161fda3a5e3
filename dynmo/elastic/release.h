// SPDX-License-Identifier: Apache-2.0
#pragma once

// Returning ranks to a job manager: the environment of a hook, the meaning of its exit code, and
// the order of hooks.
//
// When a rank has left, its host may return to the job manager. DynMo knows no job manager. For
// each release it calls a program of the user, the hook, with the released and the kept hosts in
// its environment. The hook may say "not now" and is then called again. Any other failure parks the
// release: it is kept and reported, and training continues.
//
// Everything here is a value or a pure function, and time is an argument. release_driver.h runs the
// program.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/elastic/member.h"

namespace dynmo::elastic {

// A release. Ranks are members here, and only their numbers and hosts matter.
struct Release {
  std::int64_t number = 0;  // 1, 2, ... of a run
  std::vector<Member> released = {};
  std::vector<Member> kept = {};  // ranks that run when the hook is called
  // Calls of the hook so far, including the present one.
  int calls = 0;
  int calls_before = 0;  // calls before it was tried again
};

// Returns the hosts of the released ranks on which no kept rank runs. Each host occurs once, in the
// order of the ranks.
[[nodiscard]] std::vector<std::string> released_hosts(const Release& release);
// Returns the hosts of the kept ranks, like released_hosts().
[[nodiscard]] std::vector<std::string> kept_hosts(const Release& release);

// The variables that a hook finds in its environment, in addition to the run's own. Lists are
// joined by commas.
using Variables = std::vector<std::pair<std::string, std::string>>;
[[nodiscard]] Variables hook_environment(const Release& release, std::string_view run);

// Exit codes of a hook.
inline constexpr int kHookDone = 0;
inline constexpr int kHookNotNow = 75;  // EX_TEMPFAIL of sysexits.h: call again later

// The number of calls of a hook that says "not now", and the pauses between them. Each pause is
// twice the previous one, up to `max_pause`.
struct HookRetries {
  int max_calls = 6;
  std::chrono::milliseconds first_pause{5000};
  std::chrono::milliseconds max_pause{60000};
};

// Returns the pause from the `calls`-th call to the next.
[[nodiscard]] std::chrono::milliseconds pause_after(const HookRetries& retries, int calls);

enum class ReleaseOutcome {
  kDone,    // returned
  kNotNow,  // the hook will be called again
  kParked,  // not returned; tried again only on request
};

// The releases of a run. One hook runs at a time, and the oldest due release is first. One thread
// uses it.
//
// A hook gets the ranks that run when it is called, not those that ran when its ranks left. So a
// retry after another change does not return a host that is in use again.
class Releases {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit Releases(const HookRetries& retries = {}) : retries_(retries) {}

  // Adds a release of ranks that have ended, while the `kept` ones continue. Returns its number.
  // Requires at least one released rank, and none in both lists.
  std::int64_t add(std::vector<Member> released, std::vector<Member> kept);
  // Sets the ranks that run. Call it when ranks have joined or were lost.
  void set_running(std::vector<Member> ranks) { running_ = std::move(ranks); }

  // Returns the release whose hook must be called now. It is in progress until ended() or failed().
  // Returns nothing while another is in progress.
  [[nodiscard]] std::optional<Release> next(Time now);
  // Returns the time from which next() returns a release, if none is added. Returns nullopt if none
  // waits, or if one is in progress.
  [[nodiscard]] std::optional<Time> due() const;

  // Ends the hook in progress with this exit code. Requires a hook in progress.
  [[nodiscard]] ReleaseOutcome ended(int exit_code, Time now);
  // Parks the release in progress, whose hook was killed or never started.
  void failed() { park(); }
  // Makes the parked releases wait again, with a new count of calls. Returns their number.
  int try_again(Time now);
  // The open releases with which another leader continues: all except that in progress.
  struct Open {
    std::int64_t last_number = 0;
    std::vector<Release> waiting = {};
    std::vector<Release> parked = {};
  };
  [[nodiscard]] Open open() const;
  // Forgets the open releases, because another leader has them.
  void forget_open();
  // Takes over open releases. Requires a new object. All waiting releases are due.
  void take_over(Open open);
  // Parks the releases that wait for another call, because the run ends, and returns them. Requires
  // none in progress.
  std::vector<Release> give_up();

  [[nodiscard]] bool is_idle() const { return waiting_.empty() && !current_; }
  [[nodiscard]] const std::vector<Release>& parked() const { return parked_; }

 private:
  struct Waiting {
    Release release;
    Time due{};
  };
  void park();

  HookRetries retries_;
  std::int64_t last_number_ = 0;
  std::vector<Member> running_;
  std::vector<Waiting> waiting_;  // in the order of their numbers
  std::optional<Release> current_;
  std::vector<Release> parked_;
};

}  // namespace dynmo::elastic
