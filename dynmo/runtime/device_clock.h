// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures the time of work on the device that does it. On the CPU that is the host's clock. A
// device runs its work later than the host queues it. So there a mark is an event in the device's
// stream. Its time is known when the device has passed it. An emulated device has its own time.

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <cstddef>
#include <deque>

#include "dynmo/model/emulated/device.h"

namespace dynmo::runtime {

// A clock for one thread. It measures the thread's current stream on the device.
class DeviceClock {
 public:
  // A point in the work of the device. It belongs to the clock that made it.
  struct Mark {
    std::chrono::steady_clock::time_point host;  // time of mark()
    std::size_t event = 0;                       // index, on a device
  };

  // Makes the first mark, start(), at once. A device that is still busy reaches this mark later
  // than the host. On the CPU the times are those of `emulated`, if that has worked.
  explicit DeviceClock(at::Device device, model::EmulatedDevice* emulated = nullptr);

  // Makes a mark behind all work that this thread has given the device so far.
  [[nodiscard]] Mark mark();
  [[nodiscard]] Mark start() const { return start_; }

  // Waits until the device has done all work of this thread's stream. Copies in other streams
  // (side_copies.h) may go on.
  void finish();

  // Returns the seconds between two marks. On a device the marks must have been made before
  // finish().
  [[nodiscard]] double seconds(Mark from, Mark to) const;

 private:
  at::Device device_;
  model::EmulatedDevice* emulated_;
  std::deque<c10::Event> events_;
  Mark start_;
};

}  // namespace dynmo::runtime
