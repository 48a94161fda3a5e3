// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes one rank's files of a checkpoint while training continues. Layers are copied, and the
// writer's own thread writes the copies to the disk.
//
// The copies never take more than a limit. A layer may not fit into its free part, or the system
// may have no memory. Then the caller's thread writes the layer before add_layer() returns. So with
// a limit of 0 all writes are synchronous. The file is the same in both cases, byte for byte.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"

namespace dynmo::checkpoint {

// Writes the files of layers in the background. One thread uses it. Within the limit, only wait(),
// wait_for() and finish() wait for the disk.
class BackgroundWriter {
 public:
  explicit BackgroundWriter(Bytes memory);
  ~BackgroundWriter();  // completes the current file; drops the queue
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  // Writes the layer's file into `pending`, now or later. The tensors may change once this has
  // returned. After an error later layers are skipped, until finish().
  void add_layer(const std::filesystem::path& pending, const LayerFile& layer);
  // Like add_layer(), for a layer whose bytes are still being copied to host memory. `arrived`
  // waits for them, returns the layer, and owns the memory. It runs once, on the writer's thread if
  // `bytes` fit into the limit. Nothing else is copied.
  void add_arriving(const std::filesystem::path& pending, Bytes bytes,
                    std::function<LayerFile()> arrived);
  // Returns the free part of the limit.
  [[nodiscard]] Bytes room() const;
  // Runs `task` on the writer's thread, after all that was added before. It runs also if an earlier
  // job failed.
  void add_task(std::function<Expected<void>()> task);

  // Returns whether anything is queued or in progress.
  [[nodiscard]] bool busy() const;
  // Waits until the writer is not busy.
  void wait() const;
  void wait_for(std::chrono::milliseconds most) const;
  // Waits, and returns the entries of the layers added since the last call, or the first error of a
  // layer or task. Rethrows an exception of one of them.
  [[nodiscard]] Expected<std::vector<FileEntry>> finish();

  // Forgets all that was added since the last finish(), without waiting. The file in progress is
  // still completed in the background.
  void drop();
  // Returns whether a dropped file is still in progress.
  [[nodiscard]] bool writes_dropped() const;

  // Returns the maximum of bytes copied and not yet written.
  [[nodiscard]] Bytes peak_memory() const;

 private:
  struct Job {
    // Returns a layer's entry, or none for a task.
    std::function<Expected<std::optional<FileEntry>>()> work;
    bool is_layer = false;
    Bytes held;
  };

  // Reserves `bytes` of the limit. Returns false if they do not fit, or nullopt after an error.
  [[nodiscard]] std::optional<bool> reserve(Bytes bytes);
  void run(const std::stop_token& stop);
  void keep(Expected<std::optional<FileEntry>> result, std::exception_ptr fault);  // under mutex_

  const Bytes memory_;
  mutable std::mutex mutex_;  // guards the members below except thread_
  mutable std::condition_variable_any changed_;
  std::deque<Job> queue_;
  bool running_ = false;
  bool dropped_ = false;  // the running job was dropped
  Bytes held_;
  Bytes peak_;
  std::vector<FileEntry> entries_;
  std::optional<Error> error_;
  std::exception_ptr fault_;
  // Last, because it uses all members above.
  std::jthread thread_;
};

}  // namespace dynmo::checkpoint
