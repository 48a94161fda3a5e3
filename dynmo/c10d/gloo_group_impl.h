// SPDX-License-Identifier: Apache-2.0
#pragma once

// A group that has been joined, on c10d's Gloo backend: messages, and what becomes of them when a
// rank is lost. c10d_transport.cpp has how it is joined.

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

#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/elastic/control_plane.h"

namespace dynmo::c10d {

// The first line of what c10d or Gloo says; they add stack traces and places in their sources.
[[nodiscard]] std::string first_line_of(const std::exception& exception);

// The works of one group that are waited for, and why it failed. Any thread may call.
class Outstanding {
 public:
  using Works = std::list<c10::intrusive_ptr<::c10d::Work>>;

  // Aborts them all; the first call wins.
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
  // Requires that it has.
  [[nodiscard]] std::chrono::steady_clock::time_point failed_at() const {
    const std::lock_guard lock(mutex_);
    return failed_at_;
  }

  Works::iterator add(c10::intrusive_ptr<::c10d::Work> work) {
    const std::lock_guard lock(mutex_);
    if (failure_) work->abort();  // the group failed since it was posted
    return works_.insert(works_.end(), std::move(work));
  }
  // Under the lock, so that nobody else holds the work after it: with the work goes Gloo's right to
  // touch the bytes.
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

// A group and its operations share this state. Made by one thread before it is shared, not changed
// later.
struct GroupState {
  transport::Member rank;
  int size;
  std::chrono::milliseconds verdict_time;  // longer than the plane's silence
  std::shared_ptr<Outstanding> outstanding = std::make_shared<Outstanding>();  // and the watch
  c10::intrusive_ptr<::c10d::Backend> gloo = {};
  std::string address = {};                         // of this rank, as the others reach it
  std::shared_ptr<elastic::GroupWatch> watch = {};  // gone first

  [[nodiscard]] std::optional<Error> failure() const { return outstanding->failure(); }
  // Fails the group here and everywhere.
  void abort(const Error& why) const {
    if (watch == nullptr) return outstanding->fail(why);
    watch->announce(why);
    outstanding->fail(watch->verdict().value_or(why));  // an earlier one stays
  }
};

[[nodiscard]] std::unique_ptr<Group> make_gloo_group(std::shared_ptr<GroupState> state,
                                                     std::shared_ptr<Store> store,
                                                     std::chrono::milliseconds message_timeout);

}  // namespace dynmo::c10d
