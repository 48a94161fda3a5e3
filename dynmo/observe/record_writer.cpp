// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/record_writer.h"

#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"

namespace dynmo::observe {

Expected<std::unique_ptr<RecordWriter>> RecordWriter::open(const std::filesystem::path& path,
                                                           const RecordWriterOptions& options) {
  DYNMO_CHECK(options.queue_records >= 1, "room for at least one record");
  if (options.start == RecordWriterOptions::Start::kAppend) DYNMO_TRY(cut_torn_line(path));
  DYNMO_ASSIGN(auto file, process::AppendFile::open(path, options.start, "step records"));
  return std::unique_ptr<RecordWriter>(new RecordWriter(std::move(file), options));
}

RecordWriter::RecordWriter(process::AppendFile file, const RecordWriterOptions& options)
    : file_(std::move(file)),
      queue_records_(options.queue_records),
      also_(options.also),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

RecordWriter::~RecordWriter() { (void)close(); }

void RecordWriter::write(const StepRecord& record) {
  {
    const std::scoped_lock lock(mutex_);
    DYNMO_CHECK(!closed_, "no record after close()");
    if (queue_.size() >= queue_records_) {
      leave_out(1, make_error(ErrorCode::kBadInput, "the disk of '{}' is slower than the steps",
                              file_.path().string()));
      return;
    }
    queue_.push_back(record);
  }
  filled_.notify_one();
}

std::optional<Error> RecordWriter::take_failure() {
  const std::scoped_lock lock(mutex_);
  if (std::exchange(reported_, failure_.has_value())) return std::nullopt;
  return failure_;
}

std::int64_t RecordWriter::missing() const {
  const std::scoped_lock lock(mutex_);
  return missing_;
}

Expected<void> RecordWriter::close() {
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
  }
  if (thread_.joinable()) {
    thread_.request_stop();
    thread_.join();
    if (const auto closed = file_.close(); !closed) {
      const std::scoped_lock lock(mutex_);
      leave_out(0, closed.error());
    }
  }
  const std::scoped_lock lock(mutex_);
  if (!failure_) return {};
  return make_error(ErrorCode::kBadInput, "'{}' lacks {} step records: {}", file_.path().string(),
                    missing_, failure_->message);
}

void RecordWriter::run(const std::stop_token& stop) {
  std::vector<StepRecord> batch;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      // Wakes for a record or the stop; the deadline is a safety net.
      (void)filled_.wait_for(lock, stop, std::chrono::seconds(1),
                             [this] { return !queue_.empty(); });
      if (queue_.empty() && stop.stop_requested()) return;
      batch.swap(queue_);
    }
    try {
      write_batch(batch);
    } catch (const std::exception& fault) {  // no exception leaves a thread
      const std::scoped_lock lock(mutex_);
      leave_out(batch.size(), make_error(ErrorCode::kInternal, "{}", fault.what()));
    }
    batch.clear();
  }
}

// Writes the records. If not all of them fit on the disk, writes them line by line, because some
// may fit.
void RecordWriter::write_batch(const std::vector<StepRecord>& batch) {
  std::vector<std::string> lines;
  std::string all;
  for (const StepRecord& record : batch) {
    lines.push_back(record_json(record).dump() + "\n");
    all += lines.back();
    if (also_) also_(record);
  }
  if (file_.append(all)) return;
  for (const std::string& line : lines) {
    const auto appended = file_.append(line);
    if (appended) continue;
    const std::scoped_lock lock(mutex_);
    leave_out(1, appended.error());
  }
}

// Counts records that the file lacks, and keeps the first reason. Requires the lock.
void RecordWriter::leave_out(std::size_t records, const Error& why) {
  missing_ += static_cast<std::int64_t>(records);
  if (!failure_) failure_ = why;
}

}  // namespace dynmo::observe
