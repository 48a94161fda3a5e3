// SPDX-License-Identifier: Apache-2.0
#include "dynmo/checkpoint/background_writer.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

namespace dynmo::checkpoint {
namespace {

Bytes size_of(const LayerFile& layer) {
  Bytes bytes;
  for (const TensorView& tensor : layer.tensors) {
    bytes += Bytes{static_cast<std::int64_t>(tensor.bytes.size())};
  }
  return bytes;
}

Expected<std::optional<FileEntry>> entry_of(const std::filesystem::path& pending,
                                            const LayerFile& layer) {
  DYNMO_ASSIGN(FileEntry entry, write_layer(pending, layer));
  return std::optional(std::move(entry));
}

using Buffer = std::shared_ptr<std::byte[]>;

// Returns the layer with its bytes copied into `buffer`, which has room for them.
LayerFile copy_into(const Buffer& buffer, const LayerFile& layer) {
  LayerFile copy = layer;
  std::byte* to = buffer.get();
  for (TensorView& tensor : copy.tensors) {
    std::copy(tensor.bytes.begin(), tensor.bytes.end(), to);
    tensor.bytes = {to, tensor.bytes.size()};
    to += tensor.bytes.size();
  }
  return copy;
}

}  // namespace

BackgroundWriter::BackgroundWriter(Bytes memory)
    : memory_(memory), thread_([this](const std::stop_token& stop) { run(stop); }) {}

BackgroundWriter::~BackgroundWriter() {
  thread_.request_stop();
  thread_.join();
}

std::optional<bool> BackgroundWriter::reserve(Bytes bytes) {
  const std::lock_guard lock(mutex_);
  if (error_ || fault_) return std::nullopt;
  if (held_ + bytes > memory_) return false;
  held_ += bytes;
  peak_ = std::max(peak_, held_);
  return true;
}

Bytes BackgroundWriter::room() const {
  const std::lock_guard lock(mutex_);
  return memory_ - held_;
}

void BackgroundWriter::add_layer(const std::filesystem::path& pending, const LayerFile& layer) {
  const Bytes bytes = size_of(layer);
  const std::optional<bool> fits = reserve(bytes);
  if (!fits) return;
  Buffer buffer;
  if (*fits) {
    // One byte at least, so that null means that there is no memory.
    const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes.value, 1));
    buffer = Buffer(new (std::nothrow) std::byte[size]);
  }
  if (buffer == nullptr) {
    auto result = entry_of(pending, layer);
    const std::lock_guard lock(mutex_);
    if (*fits) held_ -= bytes;
    keep(std::move(result), nullptr);
    return;
  }
  Job job{.work = [pending, buffer,
                   copy = copy_into(buffer, layer)] { return entry_of(pending, copy); },
          .is_layer = true,
          .held = bytes};
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(job));
  changed_.notify_all();
}

void BackgroundWriter::add_arriving(const std::filesystem::path& pending, Bytes bytes,
                                    std::function<LayerFile()> arrived) {
  const std::optional<bool> fits = reserve(bytes);
  if (!fits) return;
  if (!*fits) {
    auto result = entry_of(pending, arrived());
    const std::lock_guard lock(mutex_);
    keep(std::move(result), nullptr);
    return;
  }
  Job job{.work = [pending, arrived = std::move(arrived)] { return entry_of(pending, arrived()); },
          .is_layer = true,
          .held = bytes};
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(job));
  changed_.notify_all();
}

void BackgroundWriter::add_task(std::function<Expected<void>()> task) {
  const std::lock_guard lock(mutex_);
  queue_.push_back({.work = [task = std::move(task)]() -> Expected<std::optional<FileEntry>> {
                      DYNMO_TRY(task());
                      return std::optional<FileEntry>();
                    },
                    .is_layer = false,
                    .held = {}});
  changed_.notify_all();
}

bool BackgroundWriter::busy() const {
  const std::lock_guard lock(mutex_);
  return running_ || !queue_.empty();
}

void BackgroundWriter::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !running_ && queue_.empty(); });
}

void BackgroundWriter::wait_for(std::chrono::milliseconds most) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, most, [this] { return !running_ && queue_.empty(); });
}

void BackgroundWriter::drop() {
  const std::lock_guard lock(mutex_);
  for (const Job& job : queue_) held_ -= job.held;
  queue_.clear();
  entries_.clear();
  error_.reset();
  fault_ = nullptr;
  dropped_ = running_;
  changed_.notify_all();
}

bool BackgroundWriter::writes_dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

Expected<std::vector<FileEntry>> BackgroundWriter::finish() {
  wait();
  const std::lock_guard lock(mutex_);
  auto entries = std::exchange(entries_, {});
  const auto error = std::exchange(error_, std::nullopt);
  if (const auto fault = std::exchange(fault_, nullptr)) std::rethrow_exception(fault);
  if (error) return *error;
  return entries;
}

Bytes BackgroundWriter::peak_memory() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

void BackgroundWriter::keep(Expected<std::optional<FileEntry>> result, std::exception_ptr fault) {
  if (fault != nullptr) {
    if (!fault_) fault_ = std::move(fault);
  } else if (!result) {
    if (!error_) error_ = result.error();
  } else if (*result) {
    entries_.push_back(std::move(**result));
  }
}

void BackgroundWriter::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [this] { return !queue_.empty(); }) && !stop.stop_requested()) {
    Job job = std::move(queue_.front());
    queue_.pop_front();
    running_ = true;
    const bool skip = job.is_layer && (error_ || fault_);
    lock.unlock();
    Expected<std::optional<FileEntry>> result = std::optional<FileEntry>();
    std::exception_ptr fault;
    try {
      if (!skip) result = job.work();
    } catch (...) {
      fault = std::current_exception();  // rethrown by finish()
    }
    job.work = nullptr;  // frees the copy
    lock.lock();
    held_ -= job.held;
    if (!std::exchange(dropped_, false)) keep(std::move(result), std::move(fault));
    running_ = false;
    changed_.notify_all();
  }
}

}  // namespace dynmo::checkpoint
