// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ends a rank whose training hangs, so that the others can continue without it. Its control plane
// alone would send heartbeats forever. A rank hangs if it has not sent, received or waited for a
// message for a given time, nor reported long work (core/progress.h). A waiting rank does not hang:
// its peer may. Nor does a rank whose device waits for a message.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>

#include "dynmo/core/progress.h"

namespace dynmo::train {

// Watches whether the thread that constructs it makes progress, by what that thread tells its
// ProgressWatch. Waits of other threads do not count.
class HangWatch final : public ProgressWatch {
 public:
  // Calls `end` once, on its own thread, if training makes no progress for `limit`. Time in which
  // that thread did not run does not count, because the whole process may have been stopped.
  HangWatch(std::chrono::milliseconds limit, std::function<void()> end);
  HangWatch(const HangWatch&) = delete;
  HangWatch& operator=(const HangWatch&) = delete;
  // Requires the thread that constructed it, or one that no longer tells anything.
  ~HangWatch();

  // Sets the function that returns whether the device waits for a message. The watch calls `waits`
  // on its own thread.
  void set_device(std::function<bool()> waits);

  [[nodiscard]] std::chrono::milliseconds limit() const { return limit_; }

  void goes_on() override { moves_.fetch_add(1, std::memory_order_relaxed); }
  void begin_wait() override { waits_.fetch_add(1, std::memory_order_relaxed); }
  void end_wait() override {
    goes_on();
    waits_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  void run(const std::stop_token& stop, const std::function<void()>& end);
  [[nodiscard]] bool device_waits();

  const std::chrono::milliseconds limit_;
  ProgressWatch* const before_;  // of the thread
  std::atomic<std::uint64_t> moves_{0};
  std::atomic<int> waits_{0};
  std::mutex mutex_;  // guards the next one
  std::function<bool()> device_waits_;
  std::jthread thread_;  // last: it uses the members above
};

}  // namespace dynmo::train
