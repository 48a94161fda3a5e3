// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/release.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::elastic {
namespace {

std::vector<std::string> hosts_of(const std::vector<Member>& ranks) {
  std::vector<std::string> hosts;
  for (const Member& rank : ranks) {
    if (std::ranges::find(hosts, rank.host) == hosts.end()) hosts.push_back(rank.host);
  }
  return hosts;
}

std::string numbers_of(const std::vector<Member>& ranks) {
  std::vector<int> numbers;
  for (const Member& rank : ranks) numbers.push_back(rank.number);
  return fmt::format("{}", fmt::join(numbers, ","));
}

}  // namespace

std::vector<std::string> released_hosts(const Release& release) {
  std::vector<std::string> hosts = hosts_of(release.released);
  std::erase_if(hosts, [&](const std::string& host) {
    return std::ranges::find(release.kept, host, &Member::host) != release.kept.end();
  });
  return hosts;
}

std::vector<std::string> kept_hosts(const Release& release) { return hosts_of(release.kept); }

Variables hook_environment(const Release& release, std::string_view run) {
  return {{"DYNMO_RELEASE", std::to_string(release.number)},
          {"DYNMO_RELEASE_CALL", std::to_string(release.calls)},
          {"DYNMO_RELEASED_HOSTS", fmt::format("{}", fmt::join(released_hosts(release), ","))},
          {"DYNMO_KEPT_HOSTS", fmt::format("{}", fmt::join(kept_hosts(release), ","))},
          {"DYNMO_RELEASED_RANKS", numbers_of(release.released)},
          {"DYNMO_KEPT_RANKS", numbers_of(release.kept)},
          {"DYNMO_RUN", std::string(run)}};
}

std::chrono::milliseconds pause_after(const HookRetries& retries, int calls) {
  std::chrono::milliseconds pause = retries.first_pause;
  for (int call = 1; call < calls && pause < retries.max_pause; ++call) pause *= 2;
  return std::min(pause, retries.max_pause);
}

std::int64_t Releases::add(std::vector<Member> released, std::vector<Member> kept) {
  DYNMO_CHECK(!released.empty(), "at least one rank to release, got none");
  for (const Member& rank : released) {
    DYNMO_CHECK(std::ranges::find(kept, rank.number, &Member::number) == kept.end(),
                "rank {} either released or kept, got both", rank.number);
  }
  running_ = std::move(kept);
  Waiting waiting;
  waiting.release.number = ++last_number_;
  waiting.release.released = std::move(released);
  waiting.due = Time::min();
  waiting_.push_back(std::move(waiting));
  return last_number_;
}

std::optional<Release> Releases::next(Time now) {
  if (current_) return {};
  const auto found =
      std::ranges::find_if(waiting_, [now](const Waiting& one) { return one.due <= now; });
  if (found == waiting_.end()) return {};
  current_ = std::move(found->release);
  waiting_.erase(found);
  ++current_->calls;
  current_->kept = running_;
  return current_;
}

std::optional<Releases::Time> Releases::due() const {
  if (current_ || waiting_.empty()) return {};
  return std::ranges::min_element(waiting_, {}, &Waiting::due)->due;
}

ReleaseOutcome Releases::ended(int exit_code, Time now) {
  DYNMO_CHECK(current_, "a hook under way, got exit code {} of none", exit_code);
  if (exit_code == kHookDone) {
    current_.reset();
    return ReleaseOutcome::kDone;
  }
  const int calls = current_->calls - current_->calls_before;
  if (exit_code != kHookNotNow || calls >= retries_.max_calls) {
    park();
    return ReleaseOutcome::kParked;
  }
  Waiting again;
  again.due = now + pause_after(retries_, calls);
  again.release = *std::move(current_);
  current_.reset();
  const auto place = std::ranges::upper_bound(
      waiting_, again.release.number, {}, [](const Waiting& one) { return one.release.number; });
  waiting_.insert(place, std::move(again));
  return ReleaseOutcome::kNotNow;
}

void Releases::park() {
  DYNMO_CHECK(current_, "a hook under way to park, got none");
  parked_.push_back(*std::move(current_));
  current_.reset();
}

int Releases::try_again(Time now) {
  const auto count = static_cast<int>(parked_.size());
  for (Release& release : std::exchange(parked_, {})) {
    release.calls_before = release.calls;
    waiting_.push_back({.release = std::move(release), .due = now});
  }
  std::ranges::stable_sort(waiting_, {}, [](const Waiting& one) { return one.release.number; });
  return count;
}

Releases::Open Releases::open() const {
  Open open{.last_number = last_number_, .parked = parked_};
  for (const Waiting& one : waiting_) open.waiting.push_back(one.release);
  return open;
}

void Releases::forget_open() {
  parked_.clear();
  waiting_.clear();
}

void Releases::take_over(Open open) {
  DYNMO_CHECK(last_number_ == 0, "no release of its own yet, got {}", last_number_);
  last_number_ = open.last_number;
  parked_ = std::move(open.parked);
  for (Release& release : open.waiting) {
    waiting_.push_back({.release = std::move(release), .due = Time::min()});
  }
}

std::vector<Release> Releases::give_up() {
  DYNMO_CHECK(!current_, "no hook under way, got that of release {}", current_->number);
  std::vector<Release> left;
  for (Waiting& one : waiting_) left.push_back(std::move(one.release));
  waiting_.clear();
  parked_.insert(parked_.end(), left.begin(), left.end());
  return left;
}

}  // namespace dynmo::elastic
