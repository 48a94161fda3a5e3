// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/record_writer.h"

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

// Cuts the file behind its last newline.
Expected<void> cut_torn_line(const std::filesystem::path& path) {
  std::error_code fault;
  if (!std::filesystem::exists(path, fault)) return {};
  DYNMO_ASSIGN(const std::string text, read_file(path));
  const std::size_t last = text.rfind('\n');
  const std::size_t whole = last == std::string::npos ? 0 : last + 1;
  if (whole == text.size()) return {};
  std::filesystem::resize_file(path, whole, fault);
  if (fault) {
    return make_error(ErrorCode::kBadInput, "cannot mend step records '{}': {}", path.string(),
                      fault.message());
  }
  return {};
}

}  // namespace

Expected<std::unique_ptr<RecordWriter>> RecordWriter::open(const std::filesystem::path& path,
                                                           const RecordWriterOptions& options) {
  DYNMO_CHECK(options.queue_records >= 1, "room for at least one record");
  const bool append = options.start == RecordWriterOptions::Start::kAppend;
  if (append) DYNMO_TRY(cut_torn_line(path));
  File file(std::fopen(path.c_str(), append ? "abe" : "wbe"));
  if (file == nullptr) return system_error("open", path);
  return std::unique_ptr<RecordWriter>(
      new RecordWriter(path, std::move(file), options.queue_records));
}

RecordWriter::RecordWriter(std::filesystem::path path, File file, std::size_t queue_records)
    : path_(std::move(path)),
      file_(std::move(file)),
      queue_records_(queue_records),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

RecordWriter::~RecordWriter() { (void)close(); }

void RecordWriter::write(const StepRecord& record) {
  {
    const std::scoped_lock lock(mutex_);
    DYNMO_CHECK(!closed_, "no record after close()");
    if (queue_.size() >= queue_records_) {
      ++dropped_;
      return;
    }
    queue_.push_back(record);
  }
  filled_.notify_one();
}

Expected<void> RecordWriter::close() {
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
  }
  if (thread_.joinable()) {
    thread_.request_stop();
    thread_.join();
    if (std::fclose(file_.release()) != 0) keep_error("close");
  }
  const std::scoped_lock lock(mutex_);
  if (error_) return *error_;
  if (dropped_ > 0) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' lacks {} step records: the disk was slower than the steps; write to a "
                      "faster one",
                      path_.string(), dropped_);
  }
  return {};
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
      write_lines(batch);
    } catch (const std::exception& fault) {  // no exception leaves a thread
      const std::scoped_lock lock(mutex_);
      if (!error_) {
        error_ = make_error(ErrorCode::kInternal, "cannot write step records '{}': {}",
                            path_.string(), fault.what());
      }
    }
    batch.clear();
  }
}

void RecordWriter::write_lines(const std::vector<StepRecord>& batch) {
  std::string lines;
  for (const StepRecord& record : batch) {
    lines += record_json(record).dump();
    lines += '\n';
  }
  if (lines.empty()) return;
  if (std::fwrite(lines.data(), 1, lines.size(), file_.get()) != lines.size() ||
      std::fflush(file_.get()) != 0) {
    keep_error("write");
  }
}

void RecordWriter::keep_error(const char* what) {
  const Error error = system_error(what, path_);
  const std::scoped_lock lock(mutex_);
  if (!error_) error_ = error;
}

}  // namespace dynmo::observe
