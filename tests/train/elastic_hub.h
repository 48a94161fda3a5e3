// SPDX-License-Identifier: Apache-2.0
#pragma once

// Groups of an elastic run whose ranks are threads of this process.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/elastic/groups.h"
#include "dynmo/transport/in_process.h"
#include "dynmo/transport/testing/fault.h"

namespace dynmo::train::testing {

inline constexpr std::chrono::seconds kHang{60};  // longer than anything takes on a busy machine

// Hands out the ends of in-process groups, one group a generation. Any thread.
class Hub {
 public:
  // The end of `rank` in the group of `generation`. The first that asks makes the group.
  Expected<std::unique_ptr<transport::Transport>> take(Generation generation, int size,
                                                       WorldRank rank) {
    const std::lock_guard lock(mutex_);
    if (failure_) return *failure_;
    Opening& opening = openings_[generation];
    if (opening.ends.empty()) {
      opening.ends = transport::make_in_process_group(size, {.deadline = kHang});
    }
    if (std::ssize(opening.ends) != size || opening.ends[rank.index()] == nullptr) {
      return make_error(ErrorCode::kInternal, "rank {} of {} in a group of {}, or twice", rank,
                        size, opening.ends.size());
    }
    std::unique_ptr<transport::Transport> end = std::move(opening.ends[rank.index()]);
    if (++opening.taken == size) openings_.erase(generation);
    return end;
  }

  // Returns when all ranks of the group have called it: none waits for another's end any more.
  Expected<void> leave(Generation generation, int size) {
    std::unique_lock lock(mutex_);
    const int mine = ++left_[generation];
    if (mine == size) changed_.notify_all();
    const bool all = changed_.wait_for(
        lock, kHang, [&] { return failure_.has_value() || left_[generation] >= size; });
    if (failure_) return *failure_;
    if (!all) return make_error(ErrorCode::kPeerLost, "a rank does not leave its group");
    if (++gone_[generation] == size) {
      left_.erase(generation);
      gone_.erase(generation);
    }
    return {};
  }

  // Who waits, or comes later, is told.
  void fail(const Error& why) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = why;
    changed_.notify_all();
  }

 private:
  struct Opening {
    std::vector<std::unique_ptr<transport::Transport>> ends;
    int taken = 0;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Generation, Opening> openings_;
  std::map<Generation, int> left_;
  std::map<Generation, int> gone_;
  std::optional<Error> failure_;
};

// One member's part of them.
class HubGroups final : public elastic::Groups {
 public:
  HubGroups(Hub& hub, elastic::Member self) : hub_(hub), self_(std::move(self)) {}

  Expected<void> enter(Generation generation, int size, WorldRank rank) {
    generation_ = generation;
    size_ = size;
    DYNMO_ASSIGN(end_, hub_.take(generation, size, rank));
    return {};
  }
  // Leaves the last group; an error ends it for all.
  Expected<void> close(const Expected<void>& done) {
    if (!done) {
      hub_.fail(done.error());
      if (end_ != nullptr) end_->abort(done.error());
      return done;
    }
    return end_ == nullptr ? done : hub_.leave(generation_, size_);
  }
  void ask_to_leave() { asked_ = true; }
  // Its end of the group fails at this message that it sends, unless it is `excused`.
  void fail_at(int message, std::function<bool()> excused) {
    transport::Transport& inner = *end_;
    const auto call = [&inner, excused = std::move(excused)] {
      if (!excused()) inner.abort(make_error(ErrorCode::kPeerLost, "the newcomer fails"));
    };
    end_ = transport::with_faults(
        std::move(end_), {{.kind = transport::Fault::Kind::kCall, .first = message, .call = call}});
  }
  // Ends a process that is no rank of the run yet.
  void give_up(const Error& why) {
    if (end_ != nullptr) end_->abort(why);
    end_.reset();
  }

  transport::Transport& group() override { return *end_; }
  const elastic::Member& self() const override { return self_; }
  bool asked_to_leave() const override { return asked_; }
  std::string address() const override { return "127.0.0.1"; }
  Expected<elastic::Place> open(const elastic::View& next) override {
    return elastic::Place{.generation = next.generation, .size = next.size(), .address = {}};
  }
  Expected<transport::Transport*> form(const elastic::View& next, const elastic::Place& place,
                                       const GiveUp&) override {
    next_generation_ = place.generation;
    next_size_ = place.size;
    DYNMO_ASSIGN(next_, hub_.take(place.generation, place.size, *next.rank_of(self_.id)));
    return next_.get();
  }
  void drop(const Error& why) override {
    if (next_ != nullptr) next_->abort(why);
    next_.reset();
  }
  Expected<bool> take() override {
    DYNMO_TRY(hub_.leave(generation_, size_));
    end_ = std::move(next_);
    generation_ = next_generation_;
    size_ = next_size_;
    return end_ != nullptr;
  }

 private:
  Hub& hub_;
  elastic::Member self_;
  std::atomic<bool> asked_{false};
  Generation generation_ = 0;
  int size_ = 0;
  std::unique_ptr<transport::Transport> end_;  // null once this member has left
  Generation next_generation_ = 0;
  int next_size_ = 0;
  std::unique_ptr<transport::Transport> next_;
};

}  // namespace dynmo::train::testing
