// SPDX-License-Identifier: Apache-2.0
#pragma once

// The log of one rank, for the search of a fault in a cluster: FOLDER/rank-N.log. Every
// line has time, level, rank and text (docs/formats.md). A process only appends, so that the file
// of a rank also has what was before a restart.

#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/train/setup/options.h"

namespace dynmo::train {

// The log file of a rank. Any thread may call any function. A thread of its own writes, so that no
// disk delays a caller. A full or slow disk loses lines, and nothing else.
class RankLog {
 public:
  struct Options {
    std::filesystem::path folder;  // exists
    WorldRank rank;                // the number of this process for the whole run
    config::LogLevel level = config::LogLevel::kInfo;
    std::size_t queue_lines = 1024;  // lines that wait for the disk; more lose the oldest
  };
  // Opens the file. Returns kBadInput with path and reason if that fails.
  [[nodiscard]] static Expected<std::unique_ptr<RankLog>> open(const Options& options);
  ~RankLog();
  RankLog(const RankLog&) = delete;
  RankLog& operator=(const RankLog&) = delete;

  // Adds a line, unless it matters less than the level of the options. Control characters of the
  // text become spaces.
  void write(config::LogLevel level, std::string_view text);
  // Waits until all lines are written, and closes the file. Later lines are dropped.
  void close();
  // Returns why lines are missing, on the first call after the first failure, else nullopt.
  [[nodiscard]] std::optional<std::string> take_failure();

 private:
  struct Impl;
  explicit RankLog(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Checks that this user may write to the folder of the logs, and makes it. Does nothing if there
// are no logs. Returns kBadInput with key, folder and reason.
[[nodiscard]] Expected<void> check_log_folder(const config::Config& config);

// The text of a process: what it prints, and what its log has. One thread uses it.
class LoggedReporter {
 public:
  // Prints by `given` alone, until open().
  explicit LoggedReporter(const Reporter& given) : given_(given), reporter_(given) {}
  LoggedReporter(const LoggedReporter&) = delete;
  LoggedReporter& operator=(const LoggedReporter&) = delete;
  // Opens the log of rank `rank`, if there is one, and logs `begin`. Returns kBadInput if the file
  // cannot be opened.
  [[nodiscard]] Expected<void> open(const config::Config& config, WorldRank rank,
                                    std::string_view begin);
  // Logs the end of the process with its exit code, and closes the log.
  void end(const Expected<void>& done);
  // Returns the reporter that prints and logs. It prints a line for the user if the log has lost
  // lines.
  [[nodiscard]] const Reporter& reporter() const { return reporter_; }

 private:
  void log(config::LogLevel level, std::string_view text);
  void print_failure();

  const Reporter& given_;
  std::unique_ptr<RankLog> log_;
  Reporter reporter_;
};

// Returns the first line of a process: program, rank, host and run.
[[nodiscard]] std::string process_text(const TrainOptions& options, WorldRank rank, int ranks);

}  // namespace dynmo::train
