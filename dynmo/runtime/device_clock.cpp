// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/device_clock.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace dynmo::runtime {

DeviceClock::DeviceClock(at::Device device, model::EmulatedDevice* emulated)
    : device_(device), emulated_(emulated), start_(mark()) {}

DeviceClock::Mark DeviceClock::mark() {
  const auto now = emulated_ != nullptr ? emulated_->mark() : std::chrono::steady_clock::now();
  const Mark mark{.host = now, .event = events_.size()};
  if (device_.is_cpu()) return mark;
  // (By default an event cannot measure time.)
  c10::Event& event = events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return mark;
}

void DeviceClock::finish() {
  if (device_.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  guard.synchronizeStream(guard.getStream(device_));
}

double DeviceClock::seconds(Mark from, Mark to) const {
  if (device_.is_cpu()) return std::chrono::duration<double>(to.host - from.host).count();
  return 1e-3 * events_[from.event].elapsedTime(events_[to.event]);
}

}  // namespace dynmo::runtime
