// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/hang_watch.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace dynmo::train {

using std::chrono::milliseconds;

HangWatch::HangWatch(milliseconds limit, std::function<void()> end)
    : limit_(limit),
      before_(std::exchange(ProgressWatch::of_thread(), this)),
      thread_([this, end = std::move(end)](const std::stop_token& stop) { run(stop, end); }) {}

HangWatch::~HangWatch() {
  if (ProgressWatch::of_thread() == this) ProgressWatch::of_thread() = before_;
}

void HangWatch::set_device(std::function<bool()> waits) {
  const std::lock_guard lock(mutex_);
  device_waits_ = std::move(waits);
}

bool HangWatch::device_waits() {
  const std::lock_guard lock(mutex_);
  return device_waits_ && device_waits_();
}

void HangWatch::run(const std::stop_token& stop, const std::function<void()>& end) {
  const milliseconds period = std::clamp(limit_ / 20, milliseconds(10), milliseconds(1000));
  std::mutex mutex;
  std::condition_variable_any never;
  std::unique_lock lock(mutex);
  milliseconds still{0};
  std::uint64_t moves = moves_.load(std::memory_order_relaxed);
  while (still < limit_) {
    never.wait_for(lock, stop, period, [] { return false; });
    if (stop.stop_requested()) return;
    const std::uint64_t now = moves_.load(std::memory_order_relaxed);
    const bool waits = waits_.load(std::memory_order_relaxed) > 0 || device_waits();
    still = waits || now != moves ? milliseconds(0) : still + period;
    moves = now;
  }
  end();
}

}  // namespace dynmo::train
