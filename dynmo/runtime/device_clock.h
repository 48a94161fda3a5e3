// SPDX-License-Identifier: Apache-2.0
#pragma once

// How long work takes where it is done. On the CPU that is the host's clock; a device works later
// than the host gives it work, so there a mark is an event in its stream, and times are known when
// the device has come past it. An emulated device has a time of its own.

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <cstddef>
#include <deque>

#include "dynmo/model/emulated_device.h"

namespace dynmo::runtime {

// One thread, whose current stream on the device is measured.
class DeviceClock {
 public:
  // A point in the work of the device. It belongs to the clock that made it.
  struct Mark {
    std::chrono::steady_clock::time_point host;  // when it was made
    std::size_t event = 0;                       // on a device
  };

  // Its first mark, start(), is made at once; the device should have nothing to do then. On the CPU
  // `emulated`, where it has worked, says what time it is.
  explicit DeviceClock(at::Device device, model::EmulatedDevice* emulated = nullptr);

  // Behind all that this thread has given the device so far.
  [[nodiscard]] Mark mark();
  [[nodiscard]] Mark start() const { return start_; }

  // Waits until the device has done all that it was given.
  void finish();

  // On a device only for marks made before finish().
  [[nodiscard]] double seconds(Mark from, Mark to) const;

 private:
  at::Device device_;
  model::EmulatedDevice* emulated_;
  std::deque<c10::Event> events_;
  Mark start_;
};

}  // namespace dynmo::runtime
