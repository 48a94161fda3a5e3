// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/event_log.h"

#include <gtest/gtest.h>

#include <sstream>

#include "dynmo/core/files.h"
#include "tests/support/full_disk.h"
#include "tests/support/temp_folder.h"

namespace dynmo::observe {
namespace {

using Start = EventLog::Start;

std::vector<std::string> event_lines(const std::filesystem::path& path) {
  std::vector<std::string> lines;
  const auto text = read_file(path);
  std::istringstream stream(text ? *text : "cannot be read");
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(EventLog, IsALineAnEventAsItHappens) {
  const TempFolder folder;
  const auto path = folder.path() / "events.jsonl";
  auto log = EventLog::open(path, Start::kEmpty);
  ASSERT_TRUE(log);
  log->add("size", 7, {{"ranks", {0, 2}}, {"why", "a\nb\xFF"}});
  const std::vector<std::string> lines = event_lines(path);  // while the log is open
  ASSERT_EQ(lines.size(), 1U);
  const Json event = Json::parse(lines.front());
  EXPECT_EQ(event.at("format"), kEventFormat);
  EXPECT_EQ(event.at("event"), "size");
  EXPECT_EQ(event.at("step"), 7);
  EXPECT_GT(event.at("time_s").get<double>(), 1e9);
  EXPECT_EQ(event.at("ranks"), Json({0, 2}));
  EXPECT_EQ(event.at("why"), "a\nb\xEF\xBF\xBD");
  log->add("stop", 8);
  EXPECT_EQ(event_lines(path).size(), 2U);
  EXPECT_FALSE(log->take_failure());
}

TEST(EventLog, OfARunThatGoesOnIsAppendedTo) {
  const TempFolder folder;
  for (const std::string before :
       {"", "{\"event\": \"a\"}\n", "{\"event\": \"a\"}\n{\"half a li"}) {
    const auto path = folder.write("events.jsonl", before);
    {
      auto log = EventLog::open(path, Start::kAppend);
      ASSERT_TRUE(log);
      log->add("b", 1);
    }
    const std::vector<std::string> lines = event_lines(path);
    ASSERT_FALSE(lines.empty());
    for (const std::string& line : lines) {
      EXPECT_TRUE(Json::accept(line)) << "half a line, or joined to one: " << line;
    }
    EXPECT_EQ(lines.size(), before.empty() ? 1U : 2U);
    EXPECT_TRUE(before.empty() || lines.front() == "{\"event\": \"a\"}") << lines.front();
  }
  const auto path = folder.write("events.jsonl", "old\n");
  ASSERT_TRUE(EventLog::open(path, Start::kEmpty));
  EXPECT_TRUE(event_lines(path).empty());
}

TEST(EventLog, ThatCannotBeWrittenSaysSoOnce) {
  const TempFolder folder;
  const auto nowhere = EventLog::open(folder.path() / "none" / "events.jsonl", Start::kEmpty);
  ASSERT_FALSE(nowhere);
  EXPECT_EQ(nowhere.error().code, ErrorCode::kBadInput);
  EXPECT_NE(nowhere.error().message.find("No such file"), std::string::npos);

  auto full = EventLog::open("/dev/full", Start::kAppend);
  if (!full) GTEST_SKIP() << "there is no full disk here";
  full->add("a", 1);
  full->add("b", 2);
  const auto why = full->take_failure();
  ASSERT_TRUE(why);
  EXPECT_EQ(*why, "'/dev/full' lacks what comes from here on: it cannot be written");
  EXPECT_FALSE(full->take_failure());
}

TEST(EventLog, HasNoHalfLineAndNoLaterLineIfItsDiskWasFull) {
  const TempFolder folder;
  const auto path = folder.path() / "events.jsonl";
  auto log = EventLog::open(path, Start::kEmpty);
  ASSERT_TRUE(log);
  log->add("a", 1);
  {
    const FullDisk full(std::filesystem::file_size(path) + 20);
    log->add("b", 2);
  }
  log->add("c", 3);
  EXPECT_TRUE(log->take_failure());
  const auto events = read_events(path);
  ASSERT_TRUE(events) << events.error().message;
  ASSERT_EQ(events->size(), 1U);
  EXPECT_EQ(events->front().kind, "a");
  EXPECT_EQ(event_lines(path).size(), 1U);
}

}  // namespace
}  // namespace dynmo::observe
