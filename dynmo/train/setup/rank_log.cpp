// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/rank_log.h"

#include <fmt/format.h>
#include <spdlog/async_logger.h>
#include <spdlog/details/thread_pool.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "dynmo/core/files.h"
#include "dynmo/process/append_file.h"
#include "dynmo/process/signals_blocked.h"
#include "dynmo/process/sockets.h"

namespace dynmo::train {
namespace {

using config::LogLevel;

constexpr std::array kSpdlogLevels = {spdlog::level::debug, spdlog::level::info,
                                      spdlog::level::warn, spdlog::level::err};

spdlog::level::level_enum spdlog_level(LogLevel level) {
  return kSpdlogLevels.at(static_cast<std::size_t>(level));
}

// Appends whole lines. A line that does not fit on the disk leaves no part of it.
class AppendingSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit AppendingSink(process::AppendFile file) : file_(std::move(file)) {}

  // Returns the first failure. Does not wait for a write.
  [[nodiscard]] std::optional<std::string> failure() {
    const std::scoped_lock lock(failure_mutex_);
    return failure_;
  }
  void close() {
    const std::scoped_lock lock(mutex_);
    note(file_.close());
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    note(file_.append(std::string_view(line.data(), line.size())));
  }
  void flush_() override {}
  void note(const Expected<void>& done) {
    if (done) return;
    const std::scoped_lock lock(failure_mutex_);
    if (!failure_) failure_ = done.error().message;
  }

  process::AppendFile file_;
  std::mutex failure_mutex_;
  std::optional<std::string> failure_;  // the first
};

}  // namespace

struct RankLog::Impl {
  std::shared_ptr<AppendingSink> sink;
  std::shared_ptr<spdlog::details::thread_pool> pool;  // its thread ends with the pool
  std::shared_ptr<spdlog::async_logger> logger;
  std::mutex mutex;  // guards all below
  std::size_t overrun = 0;
  bool told = false;
};

RankLog::RankLog(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RankLog::~RankLog() { close(); }

Expected<std::unique_ptr<RankLog>> RankLog::open(const Options& options) {
  using File = process::AppendFile;
  DYNMO_ASSIGN(File file,
               File::open(options.folder / fmt::format("rank-{}.log", options.rank.value),
                          File::Start::kAppend, "the log"));
  auto impl = std::make_unique<Impl>();
  impl->sink = std::make_shared<AppendingSink>(std::move(file));
  impl->sink->set_formatter(std::make_unique<spdlog::pattern_formatter>(
      fmt::format("%Y-%m-%dT%H:%M:%S.%eZ %l rank {}: %v", options.rank.value),
      spdlog::pattern_time_type::utc, "\n"));
  {
    const process::SignalsBlocked blocked;
    impl->pool = std::make_shared<spdlog::details::thread_pool>(options.queue_lines, 1);
  }
  impl->logger = std::make_shared<spdlog::async_logger>(
      "rank", impl->sink, impl->pool, spdlog::async_overflow_policy::overrun_oldest);
  impl->logger->set_level(spdlog_level(options.level));
  impl->logger->set_error_handler([](const std::string&) {});  // there is no memory for a line
  return std::unique_ptr<RankLog>(new RankLog(std::move(impl)));
}

void RankLog::write(LogLevel level, std::string_view text) {
  const auto logger = [&] {
    const std::scoped_lock lock(impl_->mutex);
    return impl_->logger;
  }();
  if (logger == nullptr || !logger->should_log(spdlog_level(level))) return;
  logger->log(spdlog_level(level), internal::one_line(std::string(text)));
}

void RankLog::close() {
  const std::scoped_lock lock(impl_->mutex);
  if (impl_->logger == nullptr) return;
  impl_->logger.reset();
  impl_->overrun = impl_->pool->overrun_counter();
  impl_->pool.reset();
  impl_->sink->close();
}

std::optional<std::string> RankLog::take_failure() {
  const std::scoped_lock lock(impl_->mutex);
  if (impl_->pool != nullptr) impl_->overrun = impl_->pool->overrun_counter();
  auto failure = impl_->sink->failure();
  if (!failure && impl_->overrun > 0) failure = "the log lacks lines: its disk is too slow";
  if (!failure || std::exchange(impl_->told, true)) return std::nullopt;
  return failure;
}

Expected<void> check_log_folder(const config::Config& config) {
  const std::string& folder = config.run.log;
  if (folder.empty()) return {};
  const auto wrong = [&](std::string_view why) {
    return make_error(ErrorCode::kBadInput,
                      "run.log is '{}': {}; wanted a folder to which this user may write", folder,
                      why);
  };
  if (const auto made = make_directories(folder); !made) return wrong(made.error().message);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) return wrong(std::strerror(errno));
  return {};
}

Expected<void> LoggedReporter::open(const config::Config& config, WorldRank rank,
                                    std::string_view begin) {
  if (config.run.log.empty()) return {};
  DYNMO_TRY(check_log_folder(config));
  DYNMO_ASSIGN(
      log_, RankLog::open({.folder = config.run.log, .rank = rank, .level = config.run.log_level}));
  reporter_.log = [this](LogLevel level, std::string_view text) { log(level, text); };
  log(LogLevel::kInfo, begin);
  return {};
}

void LoggedReporter::end(const Expected<void>& done) {
  if (log_ == nullptr) return;
  if (done) log(LogLevel::kInfo, "ended with exit code 0");
  if (!done) {
    const bool asked = done.error().code == ErrorCode::kInterrupted;
    log(asked ? LogLevel::kInfo : LogLevel::kError,
        fmt::format("ended with exit code {}: {}", exit_code(done.error().code),
                    done.error().message));
  }
  log_->close();
  print_failure();
  reporter_.log = given_.log;
  log_.reset();
}

void LoggedReporter::log(LogLevel level, std::string_view text) {
  log_->write(level, text);
  print_failure();
}

void LoggedReporter::print_failure() {
  if (const auto failure = log_->take_failure()) {
    given_.line(fmt::format("log      {}; training goes on", *failure));
  }
}

std::string process_text(const TrainOptions& options, WorldRank rank, int ranks) {
  return fmt::format("begins   {} as rank {} of {}, process {} on {}, run '{}'",
                     options.program.empty() ? "a program" : options.program, rank.value, ranks,
                     ::getpid(), options.host.empty() ? process::host_name() : options.host,
                     options.config.run.directory);
}

}  // namespace dynmo::train
