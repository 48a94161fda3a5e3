// SPDX-License-Identifier: Apache-2.0
#pragma once

// When the emulated device of a rank is done with the layers that it was given.
//
// A device works off a queue: while there is work in it, what the host does between two layers
// takes none of its time. An emulated one sleeps on its host's thread, which can only give it the
// next layer when the one before has ended, wakes up late and has messages to post first. So a
// layer does not begin when the host comes to it but when the device was done and had what the
// layer works on, and what was late does not add up.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>

namespace dynmo::model {

// An emulated device belongs to one thread. Until it is given work it has no time of its own.
class EmulatedDevice {
 public:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] bool has_worked() const { return free_.has_value(); }
  // When the next layer begins: as the last one ended; where none was given yet, now.
  [[nodiscard]] Clock::time_point time() const { return free_ ? *free_ : Clock::now(); }

  // time(), for who measures: the first work then begins at it, however late its host comes to it.
  Clock::time_point mark();

  // Works for so long. Returns when that is over, at once where it is already.
  void work(double seconds);
  // Does nothing for as long as the host needed for what the next layer works on.
  void stand_still(double seconds);

  // The next layer works on this message. Where the host had to wait for it, the layer begins now.
  // Where it was there, the layer begins when the device was free, but not before the message was
  // made.
  enum class Message { kWasThere, kWaitedFor };
  void receive(const at::Tensor& arrived, Message message);
  // How often the calling thread has given up its processor to wait for something.
  [[nodiscard]] static std::int64_t waits();

  // Writes what time it is into the first bytes of what is sent, which mean nothing otherwise: for
  // receive() of the rank that gets it. On a host with another clock it may say any time: then the
  // layer begins at one between that of the free device and now.
  void stamp(const at::Tensor& sent) const;

  // While it lives, the emulated layers that its thread calls work on the device; without one, each
  // call's work begins when it is made.
  class Use {
   public:
    explicit Use(EmulatedDevice& device);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use();

   private:
    EmulatedDevice* before_;
  };
  // Returns the device of this thread; null: none.
  [[nodiscard]] static EmulatedDevice* in_use();

 private:
  std::optional<Clock::time_point> free_;
  std::optional<Clock::time_point> marked_;  // last, before the first work
};

}  // namespace dynmo::model
