// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/run_log.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "dynmo/observe/event_log.h"
#include "tests/support/temp_folder.h"

namespace dynmo::train {
namespace {

TEST(RunLog, ARankThatComesToLeadLogsAnEventOnce) {
  const TempFolder folder;
  const observe::RunFolder run(folder.path());
  auto log = RunLog::open({}, {.name = "run"}, run, WorldRank(1), 0);
  ASSERT_TRUE(log) << log.error().message;
  std::vector<std::string> lines;
  log->set_messages([&](config::LogLevel, std::string_view line) { lines.emplace_back(line); });
  log->event("validation", 3, {{"loss", 2.5}});
  ASSERT_TRUE(log->lead());
  log->event("end", 4);
  const auto events = observe::read_events(run.events());
  ASSERT_TRUE(events) << events.error().message;
  ASSERT_EQ(events->size(), 2U);  // also the one from before
  EXPECT_EQ((*events)[0].kind, "validation");
  EXPECT_EQ(lines, (std::vector<std::string>{"step     3  run: validation {\"loss\":2.5}",
                                             "step     4  run: end"}));
}

}  // namespace
}  // namespace dynmo::train
