// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/emulated/device.h"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace dynmo::model {
namespace {

using Clock = EmulatedDevice::Clock;
using std::chrono::nanoseconds;

// Sleeps by the steady clock, which is CLOCK_MONOTONIC.
void sleep_until(Clock::time_point end) {
  const std::int64_t since_epoch = nanoseconds(end.time_since_epoch()).count();
  const timespec time{.tv_sec = since_epoch / 1'000'000'000,
                      .tv_nsec = since_epoch % 1'000'000'000};
  // Otherwise wake-ups are delayed by 50 us, to save power. Acts on this thread only, and is cheap
  // to repeat.
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr) == EINTR) {
  }
}

nanoseconds of_seconds(double seconds) { return nanoseconds(std::llround(seconds * 1e9)); }

thread_local EmulatedDevice* used = nullptr;

constexpr std::size_t kStampBytes = sizeof(std::int64_t);

bool holds_stamp(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.is_contiguous() &&
         tensor.nbytes() >= kStampBytes;
}

}  // namespace

EmulatedDevice::Use::Use(EmulatedDevice& device) : before_(used) { used = &device; }
EmulatedDevice::Use::~Use() { used = before_; }

EmulatedDevice* EmulatedDevice::in_use() { return used; }

EmulatedDevice::Clock::time_point EmulatedDevice::mark() {
  if (free_) return *free_;
  marked_ = Clock::now();
  return *marked_;
}

void EmulatedDevice::work(double seconds) {
  if (!free_) free_ = marked_;
  free_ = time() + of_seconds(seconds / speed_);
  sleep_until(*free_);
}

void EmulatedDevice::stand_still(double seconds) {
  if (free_) *free_ += of_seconds(seconds);
}

std::int64_t EmulatedDevice::waits() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

void EmulatedDevice::receive(const at::Tensor& arrived, Message message) {
  if (!free_) return;
  const Clock::time_point now = Clock::now();
  if (message == Message::kWaitedFor) {
    free_ = now;
  } else if (holds_stamp(arrived)) {
    std::int64_t made = 0;
    std::memcpy(&made, arrived.data_ptr(), kStampBytes);
    free_ = std::max(*free_, std::min(now, Clock::time_point(nanoseconds(made))));
  }
}

void EmulatedDevice::stamp(const at::Tensor& sent) const {
  if (!holds_stamp(sent)) return;
  const std::int64_t when = nanoseconds(time().time_since_epoch()).count();
  std::memcpy(sent.data_ptr(), &when, kStampBytes);
}

}  // namespace dynmo::model
