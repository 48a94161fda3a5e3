// SPDX-License-Identifier: Apache-2.0
#pragma once

// A joined group on c10d's Gloo backend: its messages, and what happens to them if a rank is lost.
// c10d_transport.cpp has the joining.

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/elastic/control_plane.h"

namespace dynmo::c10d {

// Returns the first line of a message of c10d or Gloo, which add stack traces and source positions.
[[nodiscard]] std::string first_line_of(const std::exception& exception);

// The c10d::Work objects of one group that have not completed, and its failure. Any thread may
// call.
class Outstanding {
 public:
  using Works = std::list<c10::intrusive_ptr<::c10d::Work>>;

  // Aborts all works. Only the first call has an effect.
  void fail(const Error& why) {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = why;
    failed_at_ = std::chrono::steady_clock::now();
    for (const auto& work : works_) work->abort();
  }
  [[nodiscard]] std::optional<Error> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  // Returns the time of the failure. Requires a failure.
  [[nodiscard]] std::chrono::steady_clock::time_point failed_at() const {
    const std::lock_guard lock(mutex_);
    return failed_at_;
  }

  Works::iterator add(c10::intrusive_ptr<::c10d::Work> work) {
    const std::lock_guard lock(mutex_);
    if (failure_) work->abort();  // the group failed after it was posted
    return works_.insert(works_.end(), std::move(work));
  }
  // Removes a work. Removing under the lock ensures that no other thread holds it afterwards. Gloo
  // may access the bytes until the work is destroyed.
  void remove(Works::iterator place) {
    const std::lock_guard lock(mutex_);
    works_.erase(place);
  }

 private:
  mutable std::mutex mutex_;
  std::optional<Error> failure_;
  std::chrono::steady_clock::time_point failed_at_ = {};
  Works works_;
};

// The state that a group and its operations share. It does not change once it is shared.
struct GroupState {
  transport::Member rank;
  int size;
  std::chrono::milliseconds verdict_time;  // longer than the plane's silence
  std::shared_ptr<Outstanding> outstanding =
      std::make_shared<Outstanding>();  // shared with the watch
  c10::intrusive_ptr<::c10d::Backend> gloo = {};
  // Address at which other ranks reach this one.
  std::string address = {};
  // The numbers of the ranks in messages to users. Empty if they are the ranks themselves.
  std::vector<int> numbers = {};
  std::shared_ptr<elastic::GroupWatch> watch = {};  // destroyed first

  [[nodiscard]] int number_of(transport::Member of) const {
    return numbers.empty() ? of.value : numbers[of.index()];
  }
  [[nodiscard]] std::optional<Error> failure() const { return outstanding->failure(); }
  // Fails the group here and on all other ranks.
  void abort(const Error& why) const {
    if (watch == nullptr) return outstanding->fail(why);
    watch->announce(why);
    outstanding->fail(watch->verdict().value_or(why));  // an earlier verdict stays
  }
};

[[nodiscard]] std::unique_ptr<Group> make_gloo_group(std::shared_ptr<GroupState> state,
                                                     std::shared_ptr<Store> store,
                                                     std::chrono::milliseconds message_timeout);

}  // namespace dynmo::c10d
