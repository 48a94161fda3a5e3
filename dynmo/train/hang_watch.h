// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ends a rank whose training hangs, so that the others can continue without it. Its control plane
// alone would send heartbeats forever. A rank hangs if it has not sent, received or waited for a
// message for a given time. A waiting rank does not hang: its peer may. Nor does a rank whose
// device waits for a message.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>

namespace dynmo::train {

// Watches whether the training thread makes progress. That thread calls all functions except the
// constructor and the destructor.
class HangWatch {
 public:
  // Calls `end` once, on its own thread, if training makes no progress for `limit`. Time in which
  // that thread did not run does not count, because the whole process may have been stopped.
  HangWatch(std::chrono::milliseconds limit, std::function<void()> end);

  // Sets the function that returns whether the device waits for a message. The watch calls `waits`
  // on its own thread.
  void set_device(std::function<bool()> waits);

  void moves() { moves_.fetch_add(1, std::memory_order_relaxed); }

  // While an object of this class exists, the rank does not hang.
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
           const std::function<void()>& end);
  [[nodiscard]] bool device_waits();

  std::atomic<std::uint64_t> moves_{0};
  std::atomic<int> waits_{0};
  std::mutex mutex_;  // guards the next one
  std::function<bool()> device_waits_;
  std::jthread thread_;  // last: it uses the members above
};

}  // namespace dynmo::train
