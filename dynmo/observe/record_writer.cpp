// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/record_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"

namespace dynmo::observe {
namespace {

Error system_error(std::string_view what, const std::filesystem::path& path) {
  return make_error(ErrorCode::kBadInput, "cannot {} step records '{}': {}", what, path.string(),
                    std::strerror(errno));
}

}  // namespace

Expected<std::unique_ptr<RecordWriter>> RecordWriter::open(const std::filesystem::path& path,
                                                           const RecordWriterOptions& options) {
  DYNMO_CHECK(options.queue_records >= 1, "room for at least one record");
  const bool append = options.start == RecordWriterOptions::Start::kAppend;
  if (append) DYNMO_TRY(cut_torn_line(path));
  const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (append ? 0 : O_TRUNC);
  process::UniqueFd file(::open(path.c_str(), flags, 0666));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0) return system_error("open", path);
  return std::unique_ptr<RecordWriter>(
      new RecordWriter(path, std::move(file), status.st_size, options.queue_records));
}

RecordWriter::RecordWriter(std::filesystem::path path, process::UniqueFd file, std::int64_t size,
                           std::size_t queue_records)
    : path_(std::move(path)),
      file_(std::move(file)),
      size_(size),
      queue_records_(queue_records),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

RecordWriter::~RecordWriter() { (void)close(); }

void RecordWriter::write(const StepRecord& record) {
  {
    const std::scoped_lock lock(mutex_);
    DYNMO_CHECK(!closed_, "no record after close()");
    if (queue_.size() >= queue_records_) {
      leave_out(1, make_error(ErrorCode::kBadInput, "the disk of '{}' is slower than the steps",
                              path_.string()));
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
    // A network's disk may say only now that it is full.
    if (::close(file_.release()) != 0) {
      const Error why = system_error("close", path_);
      const std::scoped_lock lock(mutex_);
      leave_out(0, why);
    }
  }
  const std::scoped_lock lock(mutex_);
  if (!failure_) return {};
  return make_error(ErrorCode::kBadInput, "'{}' lacks {} step records: {}", path_.string(),
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

// Where not all fit, some may: line by line then.
void RecordWriter::write_batch(const std::vector<StepRecord>& batch) {
  std::vector<std::string> lines;
  std::string all;
  for (const StepRecord& record : batch) {
    lines.push_back(record_json(record).dump() + "\n");
    all += lines.back();
  }
  if (all.empty() || append(all)) return;
  for (const std::string& line : lines) {
    if (append(line)) continue;
    const Error why = system_error("write", path_);
    const std::scoped_lock lock(mutex_);
    leave_out(1, why);
  }
}

// All of it or, with errno, nothing: half a line would spoil the next one.
bool RecordWriter::append(std::string_view lines) {
  std::string_view left = lines;
  while (!left.empty()) {
    const ssize_t written = ::write(file_.get(), left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int reason = written < 0 ? errno : ENOSPC;
      (void)!::ftruncate(file_.get(), size_);
      errno = reason;
      return false;
    }
    left.remove_prefix(static_cast<std::size_t>(written));
  }
  size_ += static_cast<std::int64_t>(lines.size());
  return true;
}

// Requires the lock.
void RecordWriter::leave_out(std::size_t records, const Error& why) {
  missing_ += static_cast<std::int64_t>(records);
  if (!failure_) failure_ = why;
}

}  // namespace dynmo::observe
