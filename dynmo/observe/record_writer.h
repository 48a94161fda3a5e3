// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes step records to a file, one JSON line each, without ever making training wait for the
// disk: a thread of its own formats and writes what a bounded queue holds.
//
// A disk that is full stops nothing: lines that do not fit are left out and counted, whole, and
// later ones are tried as if nothing had happened.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/observe/step_record.h"
#include "dynmo/process/sockets.h"

namespace dynmo::observe {

struct RecordWriterOptions {
  enum class Start { kEmpty, kAppend };
  Start start = Start::kEmpty;       // kAppend first cuts off a line that a crash left half written
  std::size_t queue_records = 4096;  // more than this waiting for the disk are left out
};

// Any thread may write; one thread closes, after all others have stopped writing.
class RecordWriter {
 public:
  // kBadInput, naming the path and the system's reason.
  [[nodiscard]] static Expected<std::unique_ptr<RecordWriter>> open(
      const std::filesystem::path& path, const RecordWriterOptions& options = {});
  ~RecordWriter();  // closes; call close() to learn of errors
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  // Queues the record and returns at once. Requires that close() was not called.
  void write(const StepRecord& record);

  // Why the first line was left out, once; nullopt before and after. Any thread may ask.
  [[nodiscard]] std::optional<Error> take_failure();
  // Records that the file lacks so far.
  [[nodiscard]] std::int64_t missing() const;

  // Writes what is queued and closes the file. kBadInput: how many records it lacks and why. Later
  // calls return the same.
  [[nodiscard]] Expected<void> close();

 private:
  RecordWriter(std::filesystem::path path, process::UniqueFd file, std::int64_t size,
               std::size_t queue_records);
  void run(const std::stop_token& stop);
  void write_batch(const std::vector<StepRecord>& batch);
  [[nodiscard]] bool append(std::string_view lines);
  void leave_out(std::size_t records, const Error& why);

  std::filesystem::path path_;
  process::UniqueFd file_;
  std::int64_t size_;  // of the whole lines in the file; the thread's own
  std::size_t queue_records_;
  mutable std::mutex mutex_;  // guards queue_, missing_, closed_, failure_, reported_
  std::condition_variable_any filled_;
  std::vector<StepRecord> queue_;
  std::int64_t missing_ = 0;
  bool closed_ = false;
  std::optional<Error> failure_;  // the first
  bool reported_ = false;
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace dynmo::observe
