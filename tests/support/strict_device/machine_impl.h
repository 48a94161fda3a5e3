// SPDX-License-Identifier: Apache-2.0
#pragma once

// The strict device behind libtorch's interfaces: its memory, its streams with their clocks, what
// they have yet to do, and what the host has waited for. Any thread may call anything.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "arena_impl.h"
#include "strict_device.h"

namespace dynmo::strict {

constexpr std::size_t kStreams = 256;  // of all devices; the first kDevices are their default ones
constexpr std::size_t kPooled = 16;    // of each device, which its pool gives in turn

// Holds how far each stream has come, as one stream or the host knows it.
struct Clock {
  std::array<std::uint64_t, kStreams> time{};
  void join(const Clock& other);
};

// A use of memory: the operator, and when in which stream. Time 0 is no use.
struct Use {
  std::size_t stream = 0;
  std::uint64_t time = 0;
  const char* what = "";
  [[nodiscard]] bool is_before(const Clock& clock) const { return time <= clock.time[stream]; }
};

struct Block {
  std::byte* host = nullptr;
  std::size_t bytes = 0;  // as asked for
  std::size_t room = 0;
  bool pinned = false;
  at::DeviceIndex device = 0;
  std::size_t stream = 0;  // whose memory it is
  Use written;
  std::vector<Use> read;            // the last of each stream
  std::vector<std::size_t> others;  // other streams that were named as users
  [[nodiscard]] bool is_past(const Clock& clock) const;
};

struct Event {
  Clock clock;
  std::size_t stream = 0;
  std::shared_ptr<std::chrono::steady_clock::time_point> when;
  bool asked = false;  // whether it has passed
};

class Machine {
 public:
  static Machine& get();

  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes, at::DeviceIndex device);
  [[nodiscard]] c10::DataPtr allocate_pinned(std::size_t bytes);
  [[nodiscard]] bool is_pinned(const void* at) const { return pinned_.contains(at); }
  [[nodiscard]] bool is_device(const void* at) const { return memory_.contains(at); }
  // Returns where the device finds a host's address.
  [[nodiscard]] std::byte* open(const void* at) const;
  // Returns the block that has the byte at `at`, of the device or pinned.
  [[nodiscard]] Block* block_at(const void* at);
  // Forgets the device's blocks that are kept for later.
  void empty_cache();

  // Queues `work` in the current stream of `device`. Throws if another stream's use of a block is
  // neither before nor after it.
  void launch(at::DeviceIndex device, const char* what, std::span<Block* const> read,
              std::span<Block* const> written, std::function<void()> work);

  // Throws in a NoWait scope; else counts the wait.
  void count_wait(const char* what);
  void wait_for_stream(std::size_t stream, const char* what);
  void wait_for_device(at::DeviceIndex device);
  void wait_for_event(const Event& event);
  void wait_for_current_stream(at::DeviceIndex device, const char* what);
  // Waits like the one before, for a wait that is counted.
  void finish(at::DeviceIndex device);
  // Runs what the current stream has yet to do. It is no wait: the host knows nothing of it.
  void run_current_stream(at::DeviceIndex device);

  void record(Event& event, std::size_t stream);
  void block(const Event& event, std::size_t stream);
  // Returns whether the host has waited for it.
  [[nodiscard]] bool is_past(const Event& event);
  [[nodiscard]] c10::Stream new_stream(at::Device device);
  [[nodiscard]] c10::Stream pooled_stream(at::Device device);
  void name_as_user(void* block, std::size_t stream);

  void free(Block* block);
  void set_mode(Mode mode);
  [[nodiscard]] Mode mode() const { return mode_; }
  std::map<std::string, std::int64_t> take_waits();
  [[nodiscard]] std::int64_t queued() const;
  [[nodiscard]] c10::CachingAllocator::Stat allocated(at::DeviceIndex device) const;
  void reset_allocated(at::DeviceIndex device);
  [[nodiscard]] std::int64_t caches_emptied() const { return caches_emptied_; }

 private:
  struct Queued {
    std::size_t stream;
    std::uint64_t time;
    const char* what;
    std::function<void()> work;
  };

  Machine();
  [[nodiscard]] Block* take(std::size_t bytes, bool pinned, at::DeviceIndex device);
  [[nodiscard]] Clock clock_of(std::size_t stream) const;
  void queue(Queued queued);  // with the lock
  void check_order(const Block& block, const Clock& clock, std::size_t stream, const char* what,
                   bool writes) const;
  void wait(const Clock& until);
  void run_queued(const Clock& until);
  void release_past();  // with the lock
  void fill(Block& block);

  Arena memory_;
  Arena pinned_;
  mutable std::mutex mutex_;
  std::mutex running_;  // held by the thread that works off the queue
  std::atomic<Mode> mode_;
  Clock host_;
  std::array<Clock, kStreams> streams_;
  std::array<at::DeviceIndex, kStreams> device_of_{};
  std::size_t stream_count_ = kDevices;
  std::array<std::vector<c10::Stream>, kDevices> pools_;
  std::array<std::size_t, kDevices> next_pooled_{};
  std::list<Queued> queue_;
  std::map<std::tuple<bool, std::size_t, std::size_t>, std::vector<Block*>> free_;
  std::map<const std::byte*, Block*> blocks_;  // by the host's address
  std::vector<Block*> busy_pinned_;            // closed in part
  std::vector<Block*> leaving_;                // freed, still used
  std::map<std::string, std::int64_t> waits_;
  std::array<c10::CachingAllocator::Stat, kDevices> allocated_;  // bytes of each device
  std::atomic<std::int64_t> caches_emptied_ = 0;
};

// The calling thread's current stream of a device, as a number of Machine's.
[[nodiscard]] std::size_t& current_stream(at::DeviceIndex device);
[[nodiscard]] std::size_t stream_number(const c10::Stream& stream);
[[nodiscard]] c10::Stream stream_of(std::size_t number, at::DeviceIndex device);
[[nodiscard]] at::DeviceIndex& current_device();

// Random numbers of a device, apart from the host's.
[[nodiscard]] const at::Generator& generator_of(at::DeviceIndex device);

// The operator that this thread has called last, for the message of a fault.
[[nodiscard]] const char*& last_operator();

// Ends the process with kTouched and a stack at a fault in the device's or pinned memory.
void catch_faults();

void register_guard();
void register_operators();
[[nodiscard]] c10::Allocator& device_allocator();

}  // namespace dynmo::strict
