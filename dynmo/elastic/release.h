// SPDX-License-Identifier: Apache-2.0
#pragma once

// Giving ranks back: what a hook is told, what its exit code means, and which hook runs when.
//
// A rank that a change of generation left out has ended; its host may go back to the job manager.
// DynMo knows no job manager: it calls a program of the user's, the hook, once a release, with the
// released and the kept hosts in its environment. The hook may say "not now", and is then called
// again; any other failure parks the release: it is remembered and said, and training goes on.
//
// Everything here is a value or a pure function; time is an argument. Who runs the program is
// release_driver.h.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/elastic/member.h"

namespace dynmo::elastic {

// Ranks are members here: their numbers and hosts count, nothing else of them is looked at.
struct Release {
  std::int64_t number = 0;  // 1, 2, ... of a run
  std::vector<Member> released = {};
  std::vector<Member> kept = {};  // the ranks that run when the hook is called
  int calls = 0;                  // of the hook until now, the one under way included
  int calls_before = 0;           // of these, those before it was tried again
};

// The hosts of the released ranks on which no kept rank runs, and the hosts of the kept ones. Each
// once, in the order of the ranks.
[[nodiscard]] std::vector<std::string> released_hosts(const Release& release);
[[nodiscard]] std::vector<std::string> kept_hosts(const Release& release);

// A hook finds these variables in its environment, beside the run's own (lists are joined by
// commas):
using Variables = std::vector<std::pair<std::string, std::string>>;
[[nodiscard]] Variables hook_environment(const Release& release, std::string_view run);

// Exit codes of a hook.
inline constexpr int kHookDone = 0;
inline constexpr int kHookNotNow = 75;  // EX_TEMPFAIL of sysexits.h: call again later

// How often a hook that says "not now" is called, and the pauses between: each twice the one
// before, up to the longest.
struct HookRetries {
  int max_calls = 6;
  std::chrono::milliseconds first_pause{5000};
  std::chrono::milliseconds max_pause{60000};
};

// From the `calls`-th call to the next.
[[nodiscard]] std::chrono::milliseconds pause_after(const HookRetries& retries, int calls);

enum class ReleaseOutcome {
  kDone,    // given back
  kNotNow,  // the hook will be called again
  kParked,  // not given back, and not tried again unless somebody asks for it
};

// The releases of a run: at most one hook at a time, the oldest that is due first. One thread.
//
// A hook is always told who runs when it is called, not when its ranks left: a retry after another
// release or after ranks have joined must not give back what is in use.
class Releases {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit Releases(const HookRetries& retries = {}) : retries_(retries) {}

  // These ranks have ended and those go on. Returns the number of the release. Requires that at
  // least one has ended and none is in both.
  std::int64_t add(std::vector<Member> released, std::vector<Member> kept);
  // These ranks run: to be said when ranks have joined or were lost.
  void set_running(std::vector<Member> ranks) { running_ = std::move(ranks); }

  // The release whose hook is to be called now; it is under way until `ended` or `failed`. Nothing
  // while another is under way.
  [[nodiscard]] std::optional<Release> next(Time now);
  // When `next` has something, if nothing is added; nullopt: never, or one is under way.
  [[nodiscard]] std::optional<Time> due() const;

  // The hook under way ended with this exit code. Requires one.
  [[nodiscard]] ReleaseOutcome ended(int exit_code, Time now);
  // ... or not by itself: killed, never started. It is parked.
  void failed() { park(); }
  // Those that are parked are called for again, as often as the first time. Returns how many.
  int try_again(Time now);
  // The open releases that another leader continues with: all but the one under way.
  struct Open {
    std::int64_t last_number = 0;
    std::vector<Release> waiting = {};
    std::vector<Release> parked = {};
  };
  [[nodiscard]] Open open() const;
  // That leader has it.
  void forget_open();
  // Takes over open releases in a new object: all that wait are due.
  void take_over(Open open);
  // The run ends: what waits for another call is parked. Returns those. Requires none under way.
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
