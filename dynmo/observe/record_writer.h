// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes step records to a file, one JSON line each, without making training wait for the disk. A
// separate thread formats and writes the records of a bounded queue.
//
// A full disk does not end the run. Lines that do not fit are omitted and counted, whole, and later
// ones are tried again.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/observe/step_record.h"
#include "dynmo/process/append_file.h"

namespace dynmo::observe {

struct RecordWriterOptions {
  using Start = process::AppendFile::Start;
  Start start = Start::kEmpty;       // kAppend first removes a half-written line
  std::size_t queue_records = 4096;  // if more wait for the disk, they are omitted
  // Also called with each record, by the writer's thread.
  std::function<void(const StepRecord&)> also = {};
};

// Writes records to a file in the background. Any thread may write. One thread closes, after all
// others have stopped writing.
class RecordWriter {
 public:
  // Opens the file. Returns kBadInput with the path and the system's reason.
  [[nodiscard]] static Expected<std::unique_ptr<RecordWriter>> open(
      const std::filesystem::path& path, const RecordWriterOptions& options = {});
  ~RecordWriter();  // closes; call close() for its errors
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  // Queues the record and returns at once. Requires that close() was not called.
  void write(const StepRecord& record);

  // Returns why the first line was omitted, on the first call after that, else nullopt. Any thread
  // may call it.
  [[nodiscard]] std::optional<Error> take_failure();
  // Returns the number of records that the file lacks so far.
  [[nodiscard]] std::int64_t missing() const;

  // Writes the queued records and closes the file. Returns kBadInput with the number of missing
  // records and the reason. Later calls return the same.
  [[nodiscard]] Expected<void> close();

 private:
  RecordWriter(process::AppendFile file, const RecordWriterOptions& options);
  void run(const std::stop_token& stop);
  void write_batch(const std::vector<StepRecord>& batch);
  void leave_out(std::size_t records, const Error& why);

  process::AppendFile file_;  // used by the thread only
  std::size_t queue_records_;
  std::function<void(const StepRecord&)> also_;
  mutable std::mutex mutex_;  // guards queue_, missing_, closed_, failure_, reported_
  std::condition_variable_any filled_;
  std::vector<StepRecord> queue_;
  std::int64_t missing_ = 0;
  bool closed_ = false;
  std::optional<Error> failure_;  // the first
  bool reported_ = false;
  std::jthread thread_;  // last, as it uses all members above
};

}  // namespace dynmo::observe
