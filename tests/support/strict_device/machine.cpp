// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "dynmo/core/check.h"
#include "machine_impl.h"

namespace dynmo::strict {

using c10::CachingAllocator::Stat;

namespace {

constexpr std::size_t kArena = std::size_t{64} << 30;  // addresses
constexpr std::size_t kAlignment = 512;                // of CUDA's allocator
constexpr int kNaN = 0xFF;  // a NaN of each type of floats, -1 of integers

thread_local int no_waits = 0;

// Rounds up, so that memory of near sizes is reused.
std::size_t room_for(std::size_t bytes, std::size_t alignment) {
  const std::size_t step = std::max(alignment, std::bit_floor(std::max<std::size_t>(bytes, 1)) / 4);
  return (bytes + step - 1) / step * step;
}

void delete_block(void* context) { Machine::get().free(static_cast<Block*>(context)); }

Mode first_mode() {
  const char* const wanted = std::getenv("DYNMO_STRICT_DEVICE");
  return wanted != nullptr && std::string_view(wanted) == "late" ? Mode::kLate : Mode::kAtOnce;
}

}  // namespace

void Clock::join(const Clock& other) {
  for (std::size_t s = 0; s < kStreams; ++s) time[s] = std::max(time[s], other.time[s]);
}

bool Block::is_past(const Clock& clock) const {
  return written.is_before(clock) &&
         std::ranges::all_of(read, [&](const Use& use) { return use.is_before(clock); });
}

Machine& Machine::get() {
  static auto* const machine = new Machine();  // outlives all tensors
  return *machine;
}

Machine::Machine()
    : memory_("strict device", kArena, Access::kNone),
      pinned_("strict pinned", kArena, Access::kAll),
      mode_(first_mode()) {
  for (std::size_t d = 0; d < kDevices; ++d) device_of_[d] = static_cast<at::DeviceIndex>(d);
}

std::byte* Machine::open(const void* at) const {
  return memory_.contains(at) ? memory_.open(at) : pinned_.open(at);
}

Block* Machine::take(std::size_t bytes, bool pinned, at::DeviceIndex device) {
  const std::size_t alignment = pinned ? whole_pages(1) : kAlignment;
  const std::size_t room = room_for(bytes, alignment);
  const std::size_t stream = pinned ? 0 : current_stream(device);
  std::vector<Block*>& ready = free_[{pinned, stream, room}];
  Block* block = nullptr;
  if (!ready.empty()) {
    block = ready.back();
    ready.pop_back();
  } else {
    Arena& arena = pinned ? pinned_ : memory_;
    block = new Block;  // as long as its arena
    block->host = arena.take(room, alignment);
    block->room = room;
    block->pinned = pinned;
    block->device = device;
    block->stream = stream;
    std::memset(open(block->host), kNaN, room);
    blocks_[block->host] = block;
  }
  block->bytes = bytes;
  return block;
}

c10::DataPtr Machine::allocate(std::size_t bytes, at::DeviceIndex index) {
  const at::Device device(at::kPrivateUse1, index);
  if (bytes == 0) return {nullptr, device};
  Block* block = nullptr;
  Stat allocated;
  {
    const std::lock_guard lock(mutex_);
    block = take(bytes, /*pinned=*/false, index);
    Stat& all = allocated_.at(static_cast<std::size_t>(index));
    all.increase(bytes);
    allocated = all;
  }
  c10::reportMemoryUsageToProfiler(block->host, static_cast<std::int64_t>(bytes),
                                   static_cast<std::size_t>(allocated.current), 0, device);
  return {block->host, block, &delete_block, device};
}

c10::DataPtr Machine::allocate_pinned(std::size_t bytes) {
  if (bytes == 0) return {nullptr, at::kCPU};
  const std::lock_guard lock(mutex_);
  Block* const block = take(bytes, /*pinned=*/true, 0);
  return {block->host, block, &delete_block, at::kCPU};
}

Block* Machine::block_at(const void* at) {
  const std::lock_guard lock(mutex_);
  auto found = blocks_.upper_bound(static_cast<const std::byte*>(at));
  DYNMO_CHECK(found != blocks_.begin(), "memory that was allocated");
  return std::prev(found)->second;
}

void Machine::empty_cache() {
  const std::lock_guard lock(mutex_);
  std::erase_if(free_, [](const auto& one) { return !std::get<bool>(one.first); });
  ++caches_emptied_;
}

void Machine::fill(Block& block) { std::memset(open(block.host), kNaN, block.bytes); }

void Machine::free(Block* block) {
  const at::Device device(at::kPrivateUse1, block->device);
  if (!block->pinned) {
    c10::reportMemoryUsageToProfiler(block->host, -static_cast<std::int64_t>(block->bytes), 0, 0,
                                     device);
  }
  const std::lock_guard lock(mutex_);
  if (!block->pinned) {
    allocated_.at(static_cast<std::size_t>(block->device)).decrease(block->bytes);
    if (block->others.empty()) {
      queue({block->stream, streams_[block->stream].time[block->stream], "free",
             [this, block = *block]() mutable { fill(block); }});
      free_[{false, block->stream, block->room}].push_back(block);
      return;
    }
    for (const std::size_t other : block->others) {
      block->read.push_back({other, streams_[other].time[other], "record_stream"});
    }
    block->others.clear();
  }
  leaving_.push_back(block);
  release_past();
}

void Machine::release_past() {
  std::erase_if(busy_pinned_, [&](Block* block) {
    const bool past = block->is_past(host_);
    const bool readable = block->written.is_before(host_);
    pinned_.protect({block->host, block->room}, past       ? Access::kAll
                                                : readable ? Access::kRead
                                                           : Access::kNone);
    return past;
  });
  std::erase_if(leaving_, [&](Block* block) {
    if (!block->is_past(host_)) return false;
    fill(*block);
    free_[{block->pinned, block->stream, block->room}].push_back(block);
    return true;
  });
}

void Machine::check_order(const Block& block, const Clock& clock, std::size_t stream,
                          const char* what, bool writes) const {
  const auto check = [&](const Use& use, const char* used) {
    TORCH_CHECK(use.is_before(clock), "strict device: ", what, " of stream ", stream,
                writes ? " writes" : " reads", " memory that ", use.what, " of stream ", use.stream,
                ' ', used, ", and nothing orders the two");
  };
  check(block.written, "writes");
  if (!writes) return;
  for (const Use& use : block.read) check(use, "reads");
}

void Machine::launch(at::DeviceIndex device, const char* what, std::span<Block* const> read,
                     std::span<Block* const> written, std::function<void()> work) {
  const std::size_t stream = current_stream(device);
  {
    const std::lock_guard lock(mutex_);
    Clock& clock = streams_[stream];
    clock.join(host_);
    for (const Block* block : read) check_order(*block, clock, stream, what, /*writes=*/false);
    for (const Block* block : written) check_order(*block, clock, stream, what, /*writes=*/true);
    const Use use{stream, ++clock.time[stream], what};
    const auto busy = [&](Block* block, Access access) {
      if (!block->pinned) return;
      pinned_.protect({block->host, block->room}, access);
      if (std::ranges::find(busy_pinned_, block) == busy_pinned_.end()) {
        busy_pinned_.push_back(block);
      }
    };
    for (Block* block : read) {
      std::erase_if(block->read, [&](const Use& last) { return last.stream == stream; });
      block->read.push_back(use);
      busy(block, block->written.is_before(host_) ? Access::kRead : Access::kNone);
    }
    for (Block* block : written) {
      block->written = use;
      block->read.clear();
      busy(block, Access::kNone);
    }
    if (mode_ == Mode::kLate) {
      queue_.push_back({stream, use.time, what, std::move(work)});
      return;
    }
  }
  work();
}

void Machine::queue(Queued queued) {
  if (mode_ == Mode::kLate) {
    queue_.push_back(std::move(queued));
  } else {
    queued.work();
  }
}

void Machine::run_queued(const Clock& until) {
  const std::lock_guard one(running_);
  for (;;) {
    std::list<Queued> next;
    {
      const std::lock_guard lock(mutex_);
      const auto found = std::ranges::find_if(
          queue_, [&](const Queued& queued) { return queued.time <= until.time[queued.stream]; });
      if (found == queue_.end()) return;
      next.splice(next.begin(), queue_, found);
    }
    try {
      next.front().work();
    } catch (const std::exception& failure) {
      TORCH_CHECK(false, "strict device: ", next.front().what, " failed: ", failure.what());
    }
  }
}

void Machine::wait(const Clock& until) {
  run_queued(until);
  const std::lock_guard lock(mutex_);
  host_.join(until);
  release_past();
}

void Machine::count_wait(const char* what) {
  TORCH_CHECK(no_waits == 0, "strict device: ", what,
              " waits for the device where no wait is allowed");
  const std::lock_guard lock(mutex_);
  ++waits_[what];
}

Clock Machine::clock_of(std::size_t stream) const {
  const std::lock_guard lock(mutex_);
  return streams_[stream];
}

void Machine::wait_for_stream(std::size_t stream, const char* what) {
  count_wait(what);
  wait(clock_of(stream));
}

void Machine::wait_for_current_stream(at::DeviceIndex device, const char* what) {
  wait_for_stream(current_stream(device), what);
}

void Machine::finish(at::DeviceIndex device) { wait(clock_of(current_stream(device))); }

void Machine::run_current_stream(at::DeviceIndex device) {
  run_queued(clock_of(current_stream(device)));
}

void Machine::wait_for_device(at::DeviceIndex device) {
  count_wait("synchronize device");
  Clock until;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t s = 0; s < stream_count_; ++s) {
      if (device_of_[s] == device) until.join(streams_[s]);
    }
  }
  wait(until);
}

void Machine::wait_for_event(const Event& event) {
  count_wait("synchronize event");
  wait(event.clock);
}

void Machine::record(Event& event, std::size_t stream) {
  using Time = std::chrono::steady_clock;
  const std::lock_guard lock(mutex_);
  Clock& clock = streams_[stream];
  clock.join(host_);
  const std::uint64_t now = ++clock.time[stream];
  event.clock = clock;
  event.stream = stream;
  event.when = std::make_shared<Time::time_point>();
  queue({stream, now, "record", [when = event.when] { *when = Time::now(); }});
}

void Machine::block(const Event& event, std::size_t stream) {
  const std::lock_guard lock(mutex_);
  streams_[stream].join(event.clock);
}

bool Machine::is_past(const Event& event) {
  const std::lock_guard lock(mutex_);
  return event.clock.time[event.stream] <= host_.time[event.stream];
}

c10::Stream Machine::new_stream(at::Device device) {
  const std::lock_guard lock(mutex_);
  DYNMO_CHECK(stream_count_ < kStreams, "at most {} streams", kStreams);
  device_of_[stream_count_] = device.index();
  return stream_of(stream_count_++, device.index());
}

c10::Stream Machine::pooled_stream(at::Device device) {
  const auto index = static_cast<std::size_t>(device.index());
  std::vector<c10::Stream>& pool = pools_.at(index);
  std::size_t next = 0;
  {
    const std::lock_guard lock(mutex_);
    next = next_pooled_.at(index)++ % kPooled;
    if (next < pool.size()) return pool[next];
  }
  const c10::Stream made = new_stream(device);
  const std::lock_guard lock(mutex_);
  pool.push_back(made);
  return made;
}

void Machine::name_as_user(void* block, std::size_t stream) {
  const std::lock_guard lock(mutex_);
  static_cast<Block*>(block)->others.push_back(stream);
}

Stat Machine::allocated(at::DeviceIndex device) const {
  const std::lock_guard lock(mutex_);
  return allocated_.at(static_cast<std::size_t>(device));
}

void Machine::reset_allocated(at::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  allocated_.at(static_cast<std::size_t>(device)).reset_peak();
}

void Machine::set_mode(Mode mode) {
  const std::lock_guard lock(mutex_);
  DYNMO_CHECK(queue_.empty(), "a device that has nothing to do, not {} operators", queue_.size());
  mode_ = mode;
}

std::map<std::string, std::int64_t> Machine::take_waits() {
  const std::lock_guard lock(mutex_);
  return std::exchange(waits_, {});
}

std::int64_t Machine::queued() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(queue_.size());
}

std::int64_t queued() { return Machine::get().queued(); }
NoWait::NoWait() { ++no_waits; }
NoWait::~NoWait() { --no_waits; }
Mode mode() { return Machine::get().mode(); }
void set_mode(Mode mode) {
  Machine& machine = Machine::get();
  for (at::DeviceIndex d = 0; d < kDevices; ++d) machine.wait_for_device(d);
  machine.set_mode(mode);
}
std::int64_t caches_emptied() { return Machine::get().caches_emptied(); }
std::map<std::string, std::int64_t> take_waits() { return Machine::get().take_waits(); }

}  // namespace dynmo::strict
