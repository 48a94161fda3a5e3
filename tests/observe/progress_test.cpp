// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/progress.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace dynmo::observe {
namespace {

using namespace std::chrono_literals;

Progress::Now at(std::chrono::seconds time, int columns = 0) {
  return {
      .clock = Progress::Clock::time_point(time), .time_of_day = "12:00:00", .columns = columns};
}

TEST(Progress, IsNeverAsWideAsTheTerminalAlsoWhenThatChanges) {
  Progress progress(Progress::On::kTerminal);
  const std::string text(100, 'x');
  for (const int columns : {80, 30, 200, 10, 2}) {
    const std::string shown = progress.step(
        1, 10, [&] { return text; }, at(0s, columns));
    ASSERT_TRUE(shown.starts_with("\r\033[K"));
    EXPECT_EQ(shown.size() - 4, std::min<std::size_t>(100, static_cast<std::size_t>(columns - 1)));
  }
  EXPECT_EQ(progress
                .step(
                    2, 10, [&] { return text; }, at(0s))
                .size(),
            4 + 100 + std::string("  0 s left").size());
}

TEST(Progress, CutsBetweenCharacters) {
  EXPECT_EQ(cut_to_columns("aäöü", 2), "aä");
  EXPECT_EQ(cut_to_columns("aäöü", 4), "aäöü");
  EXPECT_EQ(cut_to_columns("aäöü", 0), "aäöü");
}

TEST(Progress, OfALongRunAFileGetsALineAMinute) {
  Progress progress(Progress::On::kFile);
  int lines = 0;
  int made = 0;
  const auto text = [&made] {
    ++made;
    return std::string("s");
  };
  for (std::int64_t step = 1; step <= 1000; ++step) {  // of 100000 steps; one takes 7 s
    lines += progress.step(step, 100000, text, at(7s * step)).empty() ? 0 : 1;
  }
  EXPECT_EQ(lines, 999 / 9);  // after 9 steps of 7 s a minute is over
  EXPECT_EQ(made, lines);
}

TEST(Progress, OfAShortRunAFileGetsTwentyLines) {
  Progress progress(Progress::On::kFile);
  int lines = 0;
  for (std::int64_t step = 1; step <= 200; ++step) {
    lines += progress.step(
                         step, 200, [] { return std::string("s"); }, at(0s))
                     .empty()
                 ? 0
                 : 1;
  }
  EXPECT_EQ(lines, 20);
}

TEST(Progress, ALineOfAFileHasTheTimeAndTheTimeLeft) {
  Progress progress(Progress::On::kFile);
  const auto shown = [&progress](std::int64_t done, std::chrono::seconds time) {
    return progress.step(
        done, 20, [done] { return fmt::format("step {}", done); }, at(time));
  };
  EXPECT_EQ(shown(11, 0s), "step 11  12:00:00\n");
  EXPECT_EQ(shown(13, 60s), "step 13  4 min left  12:00:00\n");
  EXPECT_EQ(shown(20, 90s), "step 20  12:00:00\n");
  EXPECT_EQ(time_left(99s), "99 s");
  EXPECT_EQ(time_left(11100s), "3 h 5 min");
}

}  // namespace
}  // namespace dynmo::observe
