// SPDX-License-Identifier: Apache-2.0
#pragma once

// The emulated device of a rank: decides when each layer begins and ends.
//
// A real device works off a queue. While the queue is not empty, the host's work between two layers
// costs the device no time. An emulated device sleeps on its host's thread. The host can give it
// the next layer only when the previous one has ended. It also wakes up late and has messages to
// post first.
//
// So a layer does not begin when the host reaches it. It begins when the device was free and the
// layer's inputs were there. Delays of the host therefore do not add up.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>

namespace dynmo::model {

// A device that belongs to one thread. It has no time of its own before its first work.
class EmulatedDevice {
 public:
  using Clock = std::chrono::steady_clock;

  // Makes a device on which a layer of t seconds takes t / `speed`.
  explicit EmulatedDevice(double speed = 1) : speed_(speed) {}

  [[nodiscard]] bool has_worked() const { return free_.has_value(); }
  // Returns the time at which the next layer begins: the end of the last one, or now if there was
  // none.
  [[nodiscard]] Clock::time_point time() const { return free_ ? *free_ : Clock::now(); }

  // Returns time() for a measurement. If the device has not worked yet, its first work begins at
  // that time.
  Clock::time_point mark();

  // Works for `seconds` at full speed. Sleeps until the work ends, or returns at once if it already
  // has.
  void work(double seconds);
  // Delays the next layer by `seconds`, which the host needed to prepare its input.
  void stand_still(double seconds);

  // Adds a message that the next layer needs. If the host waited for the message, the layer begins
  // now. Otherwise it begins when the device is free, but not before the time in the stamp.
  enum class Message { kWasThere, kWaitedFor };
  void receive(const at::Tensor& arrived, Message message);
  // Returns the number of times that the calling thread has given up its processor to wait.
  [[nodiscard]] static std::int64_t waits();

  // Writes time() into the first bytes of a message, whose content has no meaning. receive() reads
  // it, and takes a time after now as now, because another host's clock may differ.
  void stamp(const at::Tensor& sent) const;

  // While it exists, emulated layers that run on its thread use the device. Without it, the work of
  // each layer begins when the layer is called.
  class Use {
   public:
    explicit Use(EmulatedDevice& device);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use();

   private:
    EmulatedDevice* before_;
  };
  // Returns the device of this thread, or null.
  [[nodiscard]] static EmulatedDevice* in_use();

 private:
  double speed_;
  std::optional<Clock::time_point> free_;
  std::optional<Clock::time_point> marked_;  // last mark(), before the first work
};

}  // namespace dynmo::model
