// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/release_driver.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::elastic {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kStopGrace{2000};  // of a hook, from SIGTERM to SIGKILL
constexpr milliseconds kStopTime{10000};  // for a hook to end at the end of a run
constexpr milliseconds kHurryPoll{100};   // between two calls of `hurry`
constexpr std::size_t kHostsInALine = 8;

double in_seconds(milliseconds time) { return std::chrono::duration<double>(time).count(); }

// Returns "4-7, 12" for ascending numbers.
std::string ranges_of(const std::vector<Member>& ranks) {
  std::vector<int> numbers;
  for (const Member& rank : ranks) numbers.push_back(rank.number);
  std::ranges::sort(numbers);
  std::vector<std::string> ranges;
  for (std::size_t first = 0, last = 0; first < numbers.size(); first = ++last) {
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    ranges.push_back(first == last ? std::to_string(numbers[first])
                                   : fmt::format("{}-{}", numbers[first], numbers[last]));
  }
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranges, ", "));
}

// Returns " on a, b", or "" if no host is free.
std::string free_hosts_of(const Release& release) {
  std::vector<std::string> hosts = released_hosts(release);
  if (hosts.empty()) return "";
  const std::size_t more = hosts.size() - std::min(hosts.size(), kHostsInALine);
  hosts.resize(hosts.size() - more);
  return fmt::format(" on {}{}", fmt::join(hosts, ", "),
                     more == 0 ? "" : fmt::format(" and {} more hosts", more));
}

std::string who(const Release& release) {
  return fmt::format("release {}: {}{}", release.number, ranges_of(release.released),
                     free_hosts_of(release));
}

std::string done_line(const Release& release, std::string_view said) {
  const bool frees_hosts = !released_hosts(release).empty();
  return fmt::format("{}: {}{}{}", who(release),
                     frees_hosts ? "given back" : "ended, ranks are left on the same hosts",
                     said.empty() ? "" : ": ", said);
}

}  // namespace

ReleaseDriver::ReleaseDriver(ReleaseOptions options)
    : options_(std::move(options)), releases_(options_.retries) {}

void ReleaseDriver::release(std::vector<Member> ended, std::vector<Member> kept) {
  releases_.add(std::move(ended), std::move(kept));
}

void ReleaseDriver::set_running(std::vector<Member> ranks) {
  releases_.set_running(std::move(ranks));
}

std::vector<ReleaseNews> ReleaseDriver::poll(Hooks next) {
  std::vector<ReleaseNews> news;
  if (const auto result = runner_.poll()) note(*result, news);
  if (next == Hooks::kCall) call_next(news);
  return news;
}

void ReleaseDriver::limit_hook(milliseconds longest) {
  if (runs_hook() && Clock::now() - called_ >= longest) runner_.stop();
}

void ReleaseDriver::call_next(std::vector<ReleaseNews>& news) {
  while (auto release = releases_.next(Clock::now())) {
    if (!options_.command.empty()) {
      runner_.start({.command = {options_.command},
                     .environment = hook_environment(*release, options_.run),
                     .limit = options_.timeout,
                     .grace = kStopGrace});
      current_ = std::move(release);
      called_ = Clock::now();
      return;
    }
    const ReleaseOutcome outcome = releases_.ended(kHookDone, Clock::now());
    std::string line = fmt::format("{} ended", who(*release));
    news.push_back({outcome, *std::move(release), std::move(line)});
  }
}

void ReleaseDriver::note(const process::HookResult& result, std::vector<ReleaseNews>& news) {
  DYNMO_CHECK(current_, "the result of a hook that was called");
  Release release = *std::exchange(current_, std::nullopt);
  ReleaseOutcome outcome = ReleaseOutcome::kParked;
  if (result.end == process::HookEnd::kExited) {
    outcome = releases_.ended(result.exit_code, Clock::now());
  } else {
    releases_.failed();
  }
  const std::string said = process::last_line(result);
  const std::string reason = fmt::format("{}{}{}", result.reason, said.empty() ? "" : ": ", said);
  const int calls = release.calls - release.calls_before;
  std::string line;
  switch (outcome) {
    case ReleaseOutcome::kDone:
      line = done_line(release, said);
      break;
    case ReleaseOutcome::kNotNow:
      line =
          fmt::format("{}: not now, call {} of {} in {} s: hook '{}': {}", who(release), calls + 1,
                      options_.retries.max_calls, in_seconds(pause_after(options_.retries, calls)),
                      options_.command, reason);
      break;
    case ReleaseOutcome::kParked:
      line = fmt::format("{}: parked, not given back: hook '{}': {}", who(release),
                         options_.command, reason);
      break;
  }
  news.push_back({outcome, std::move(release), std::move(line)});
}

std::vector<ReleaseNews> ReleaseDriver::finish(milliseconds at_most,
                                               const std::function<bool()>& hurry) {
  const Clock::time_point deadline = Clock::now() + at_most;
  std::vector<ReleaseNews> news = poll();
  while (runner_.is_running()) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    auto result = runner_.wait(std::clamp(left, milliseconds(0), kHurryPoll));
    const bool is_late = left <= milliseconds(0) || (hurry && hurry());
    if (!result && !is_late) continue;
    if (!result) {
      runner_.stop();
      result = runner_.wait(kStopTime);
    }
    if (!result) break;  // the system cannot end it
    note(*result, news);
    if (!is_late) call_next(news);
  }
  if (current_) {
    releases_.failed();
    current_.reset();
  }
  for (Release& release : releases_.give_up()) {
    std::string line =
        fmt::format("{}: parked, the run has ended before {}", who(release),
                    release.calls == 0 ? "its hook was called" : "its hook was called again");
    news.push_back({ReleaseOutcome::kParked, std::move(release), std::move(line)});
  }
  return news;
}

}  // namespace dynmo::elastic
