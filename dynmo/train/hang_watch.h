// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ends a rank whose training hangs, so that the others can go on without it: its control plane
// would beat for ever. A rank hangs that neither waits for another one nor has sent or received
// anything for a given time; whoever waits for a message may wait for one that hangs.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <stop_token>
#include <thread>

namespace dynmo::train {

// One thread trains: it calls all but the constructor and the destructor.
class HangWatch {
 public:
  // `end` is called once, by a thread of the watch's own, when nothing has moved for `limit`. Time
  // in which that thread was not run does not count: the whole process may have been stopped.
  HangWatch(std::chrono::milliseconds limit, std::function<void()> end);

  void moves() { moves_.fetch_add(1, std::memory_order_relaxed); }

  // The thread does not hang while one lives.
  class Waiting {
   public:
    explicit Waiting(HangWatch* watch) : watch_(watch) {
      if (watch_ != nullptr) watch_->waits_.fetch_add(1, std::memory_order_relaxed);
    }
    ~Waiting() {
      if (watch_ == nullptr) return;
      watch_->moves();
      watch_->waits_.fetch_sub(1, std::memory_order_relaxed);
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    HangWatch* watch_;
  };

 private:
  void run(const std::stop_token& stop, std::chrono::milliseconds limit,
           const std::function<void()>& end) const;

  std::atomic<std::uint64_t> moves_{0};
  std::atomic<int> waits_{0};
  std::jthread thread_;  // last: it uses the above
};

}  // namespace dynmo::train
