// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/rank_log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "tests/support/temp_folder.h"

namespace dynmo::train {
namespace {

using config::LogLevel;
namespace fs = std::filesystem;

std::vector<std::string> lines_of(const fs::path& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

std::unique_ptr<RankLog> open_log(const fs::path& folder, int rank = 0,
                                  LogLevel level = LogLevel::kInfo) {
  return RankLog::open({.folder = folder, .rank = WorldRank(rank), .level = level}).value();
}

// Returns the descriptor of this process that has the file open.
int descriptor_of(const fs::path& path) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code fault;
    if (fs::read_symlink(entry.path(), fault) == path) return std::stoi(entry.path().filename());
  }
  return -1;
}

TEST(RankLog, ALineHasTimeLevelRankAndText) {
  const TempFolder folder;
  {
    const auto log = open_log(folder.path(), 3, LogLevel::kDebug);
    log->write(LogLevel::kDebug, "a");
    log->write(LogLevel::kInfo, "b {} %v");
    log->write(LogLevel::kWarning, "two\nlines\x1b");
    log->write(LogLevel::kError, "d");
  }
  const std::regex format(
      R"((\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (debug|info|warning|error) rank 3: (.*))");
  std::vector<std::string> found;
  std::string before;
  for (const std::string& line : lines_of(folder.path() / "rank-3.log")) {
    std::smatch parts;
    ASSERT_TRUE(std::regex_match(line, parts, format)) << line;
    EXPECT_LE(before, parts[1].str());
    before = parts[1];
    found.push_back(parts[2].str() + " " + parts[3].str());
  }
  EXPECT_EQ(found,
            (std::vector<std::string>{"debug a", "info b {} %v", "warning two lines ", "error d"}));
}

TEST(RankLog, LeavesOutWhatMattersLess) {
  for (int level = 0; level < 4; ++level) {
    const TempFolder folder;
    {
      const auto log = open_log(folder.path(), 0, static_cast<LogLevel>(level));
      for (int each = 0; each < 4; ++each) log->write(static_cast<LogLevel>(each), "x");
    }
    EXPECT_EQ(lines_of(folder.path() / "rank-0.log").size(), 4U - static_cast<unsigned>(level));
  }
}

TEST(RankLog, AppendsToWhatIsThere) {
  const TempFolder folder;
  for (const char* text : {"first", "second"}) {
    open_log(folder.path())->write(LogLevel::kInfo, text);
  }
  const auto lines = lines_of(folder.path() / "rank-0.log");
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_TRUE(lines[0].ends_with(": first"));
  EXPECT_TRUE(lines[1].ends_with(": second"));
}

TEST(RankLog, TellsOnceThatADiskIsFull) {
  const TempFolder folder;
  fs::create_symlink("/dev/full", folder.path() / "rank-0.log");
  const auto log = open_log(folder.path());
  for (int i = 0; i < 100; ++i) log->write(LogLevel::kInfo, "lost");
  log->close();
  EXPECT_EQ(log->take_failure(), "cannot write the log '" +
                                     (folder.path() / "rank-0.log").string() +
                                     "': No space left on device");
  EXPECT_EQ(log->take_failure(), std::nullopt);
  log->write(LogLevel::kInfo, "after close()");
}

TEST(RankLog, OutlivesAClosedDescriptor) {
  const TempFolder folder;
  const auto log = open_log(folder.path());
  const int descriptor = descriptor_of(fs::canonical(folder.path()) / "rank-0.log");
  ASSERT_GE(descriptor, 0);
  // A descriptor that does not write takes the number, so that nothing else of this process does.
  const int reads = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ASSERT_GE(::dup3(reads, descriptor, O_CLOEXEC), 0);
  ::close(reads);
  log->write(LogLevel::kInfo, "lost");
  log->close();
  EXPECT_NE(log->take_failure().value_or("").find("Bad file descriptor"), std::string::npos);
}

// A line is whole, whichever thread wrote it.
TEST(RankLog, TakesLinesOfSeveralThreads) {
  const TempFolder folder;
  {
    const auto log =
        RankLog::open({.folder = folder.path(), .rank = WorldRank(0), .queue_lines = 4096}).value();
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = 0; i < 500; ++i) {
          log->write(LogLevel::kInfo, std::string(40, static_cast<char>('a' + thread)));
        }
      });
    }
  }
  std::array<int, 4> seen{};
  for (const std::string& line : lines_of(folder.path() / "rank-0.log")) {
    const std::string text = line.substr(line.size() - 40);
    ++seen.at(static_cast<std::size_t>(text.front() - 'a'));
    EXPECT_EQ(text, std::string(40, text.front()));
  }
  EXPECT_EQ(seen, (std::array<int, 4>{500, 500, 500, 500}));
}

// The disk is a pipe that is not read. What does not fit is lost, and said.
TEST(RankLog, DoesNotWaitForASlowDisk) {
  const TempFolder folder;
  const fs::path path = folder.path() / "rank-0.log";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  const auto log =
      RankLog::open({.folder = folder.path(), .rank = WorldRank(0), .queue_lines = 8}).value();
  for (int i = 0; i < 4000; ++i) log->write(LogLevel::kInfo, std::string(100, 'x'));
  EXPECT_EQ(log->take_failure(), "the log lacks lines: its disk is too slow");
  std::jthread drain([&](const std::stop_token& stop) {
    std::array<char, 4096> bytes{};
    while (!stop.stop_requested()) {
      if (::read(reader, bytes.data(), bytes.size()) <= 0) std::this_thread::yield();
    }
  });
  log->close();
  drain.request_stop();
  drain.join();
  ::close(reader);
}

TEST(RankLog, AFolderThatCannotBeMadeIsRefused) {
  const TempFolder folder;
  const fs::path file = folder.write("file", "");
  config::Config config;
  EXPECT_TRUE(check_log_folder(config));
  config.run.log = (file / "log").string();
  const Expected<void> refused = check_log_folder(config);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(refused.error().message, "run.log is '" + config.run.log + "': cannot make folder '" +
                                         config.run.log +
                                         "': Not a directory; wanted a folder to which this user "
                                         "may write");
  config.run.log = (folder.path() / "a/b").string();
  EXPECT_TRUE(check_log_folder(config));
  EXPECT_TRUE(fs::is_directory(config.run.log));
}

TEST(LoggedReporter, PrintsOneLineOfAFullDiskAndTrainingGoesOn) {
  const TempFolder folder;
  fs::create_symlink("/dev/full", folder.path() / "rank-2.log");
  std::vector<std::string> printed;
  const Reporter given{.line = [&](std::string_view line) { printed.emplace_back(line); }};
  LoggedReporter logged(given);
  config::Config config;
  config.run.log = folder.path().string();
  ASSERT_TRUE(logged.open(config, WorldRank(2), "begins"));
  for (int i = 0; i < 50; ++i) logged.reporter().say("text");
  logged.end({});
  EXPECT_EQ(std::ranges::count(printed, "text"), 50);
  std::erase(printed, "text");
  ASSERT_EQ(printed.size(), 1U);
  EXPECT_TRUE(printed[0].starts_with("log      cannot write the log ")) << printed[0];
  EXPECT_TRUE(printed[0].ends_with("No space left on device; training goes on")) << printed[0];
}

TEST(LoggedReporter, EndsWithTheExitCode) {
  const TempFolder folder;
  const Reporter given;
  config::Config config;
  config.run.log = folder.path().string();
  for (const Expected<void>& done :
       {Expected<void>(), Expected<void>(Error{ErrorCode::kPeerLost, "rank 1 was lost"}),
        Expected<void>(Error{ErrorCode::kInterrupted, "stopped"})}) {
    LoggedReporter logged(given);
    ASSERT_TRUE(logged.open(config, WorldRank(0), "begins"));
    logged.end(done);
  }
  std::vector<std::string> ends;
  for (const std::string& line : lines_of(folder.path() / "rank-0.log")) {
    if (!line.ends_with("begins")) ends.push_back(line.substr(line.find('Z') + 2));
  }
  EXPECT_EQ(ends, (std::vector<std::string>{"info rank 0: ended with exit code 0",
                                            "error rank 0: ended with exit code 5: rank 1 was lost",
                                            "info rank 0: ended with exit code 130: stopped"}));
}

}  // namespace
}  // namespace dynmo::train
