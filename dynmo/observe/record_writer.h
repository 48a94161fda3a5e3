// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes step records to a file, one JSON line each, without ever making training wait for the
// disk: a thread of its own formats and writes what a bounded queue holds.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/observe/step_record.h"

namespace dynmo::observe {

struct RecordWriterOptions {
  enum class Start { kEmpty, kAppend };
  Start start = Start::kEmpty;       // kAppend first cuts off a line that a crash left half written
  std::size_t queue_records = 4096;  // more than this waiting for the disk are dropped and counted
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

  // Writes what is queued and closes the file. kBadInput: the first fault of writing (a full disk),
  // or how many records were dropped because the disk was too slow. Later calls return the same.
  [[nodiscard]] Expected<void> close();

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  using File = std::unique_ptr<std::FILE, CloseFile>;

  RecordWriter(std::filesystem::path path, File file, std::size_t queue_records);
  void run(const std::stop_token& stop);
  void write_lines(const std::vector<StepRecord>& batch);
  void keep_error(const char* what);

  std::filesystem::path path_;
  File file_;
  std::size_t queue_records_;
  std::mutex mutex_;  // guards queue_, dropped_, closed_, error_
  std::condition_variable_any filled_;
  std::vector<StepRecord> queue_;
  std::int64_t dropped_ = 0;
  bool closed_ = false;
  std::optional<Error> error_;
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace dynmo::observe
