// SPDX-License-Identifier: Apache-2.0
#pragma once

// One rank's files of a checkpoint, written while training goes on: layers are copied, a thread of
// the writer's own puts the copies on the disk.
//
// The copies never take more than a limit. A layer that does not fit into what is free of it at
// that moment (or for which the system has no memory) is written by the caller's thread, before
// add_layer returns: a limit of 0 is the synchronous write. Either way the file is the same, byte
// for byte.

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

// One thread calls it; none of its calls but wait(), wait_for() and finish() waits for the disk,
// where the limit allows.
class BackgroundWriter {
 public:
  explicit BackgroundWriter(Bytes memory);
  ~BackgroundWriter();  // ends after the file under way; what is queued is dropped
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  // Writes the layer's file into `pending`, sooner or later; its tensors may change when this has
  // returned. After an error the layers behind it are passed over, until finish().
  void add_layer(const std::filesystem::path& pending, const LayerFile& layer);
  // Runs `task` after all that was added before, on the writer's thread, whatever became of that.
  void add_task(std::function<Expected<void>()> task);

  [[nodiscard]] bool busy() const;  // something is queued or under way
  void wait() const;                // until it is not
  void wait_for(std::chrono::milliseconds most) const;
  // Waits; the entries of the layers added since the last call, or the first error of a layer or
  // task. Rethrows what one of them threw.
  [[nodiscard]] Expected<std::vector<FileEntry>> finish();

  // Forgets what was added since the last finish(). Waits for nothing: a file under way is written
  // to its end, or for as long as the disk hangs.
  void drop();
  [[nodiscard]] bool writes_dropped() const;  // that file is still under way

  [[nodiscard]] Bytes peak_memory() const;  // most bytes copied and not yet written, so far

 private:
  struct Job {
    // A layer's entry; none of a task.
    std::function<Expected<std::optional<FileEntry>>()> work;
    bool is_layer = false;
    Bytes held;
  };

  void run(const std::stop_token& stop);
  void keep(Expected<std::optional<FileEntry>> result, std::exception_ptr fault);  // under mutex_

  const Bytes memory_;
  mutable std::mutex mutex_;  // guards all below but thread_
  mutable std::condition_variable_any changed_;
  std::deque<Job> queue_;
  bool running_ = false;
  bool dropped_ = false;  // what runs was dropped
  Bytes held_;
  Bytes peak_;
  std::vector<FileEntry> entries_;
  std::optional<Error> error_;
  std::exception_ptr fault_;
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace dynmo::checkpoint
