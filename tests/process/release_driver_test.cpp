// SPDX-License-Identifier: Apache-2.0
// Beside the tests of hooks, not in tests/elastic: it starts processes and threads.
#include "dynmo/elastic/release_driver.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/support/process.h"
#include "tests/support/samples.h"
#include "tests/support/temp_folder.h"

namespace dynmo::elastic {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using Outcomes = std::vector<ReleaseOutcome>;

constexpr auto kDone = ReleaseOutcome::kDone;
constexpr auto kNotNow = ReleaseOutcome::kNotNow;
constexpr auto kParked = ReleaseOutcome::kParked;

std::vector<Member> members(const std::vector<std::pair<int, std::string>>& numbers_and_hosts) {
  std::vector<Member> result;
  for (const auto& [number, host] : numbers_and_hosts) {
    result.push_back({.id = {}, .number = number, .host = host});
  }
  return result;
}

// A driver whose hook is a script. $DIR is a folder; `log` there is what the hook's calls have
// found, a line each.
class Driven {
 public:
  explicit Driven(const std::string& script, int max_calls = 6, milliseconds timeout = minutes(10))
      : driver_(options(script, max_calls, timeout)) {}

  // Ranks 4 and 5 on node2 go, 0 to 3 on node0 and node1 stay.
  void release() {
    driver_.release(members({{4, "node2"}, {5, "node2"}}),
                    members({{0, "node0"}, {1, "node0"}, {2, "node1"}, {3, "node1"}}));
  }
  // Polls as a training does until nothing is left to do.
  void poll_until_idle() {
    const auto deadline = Clock::now() + minutes(2);
    do {
      note(driver_.poll());
      usleep(1000);
    } while (!driver_.is_idle() && Clock::now() < deadline);
    EXPECT_TRUE(driver_.is_idle());
  }
  void note(std::vector<ReleaseNews> news) {
    for (ReleaseNews& one : news) {
      outcomes.push_back(one.outcome);
      lines.push_back(std::move(one.line));
    }
  }
  [[nodiscard]] std::string log() const {
    std::ostringstream text;
    text << std::ifstream(folder_.path() / "log").rdbuf();
    return text.str();
  }
  ReleaseDriver& operator*() { return driver_; }
  ReleaseDriver* operator->() { return &driver_; }

  Outcomes outcomes;
  std::vector<std::string> lines;

 private:
  ReleaseOptions options(const std::string& script, int max_calls, milliseconds timeout) {
    const auto hook = folder_.write(
        "hook", "#!/bin/sh\nDIR=" + folder_.path().string() +
                    "\necho \"$DYNMO_RELEASE.$DYNMO_RELEASE_CALL $DYNMO_RELEASED_HOSTS "
                    "$DYNMO_KEPT_HOSTS $DYNMO_RELEASED_RANKS $DYNMO_KEPT_RANKS $DYNMO_RUN\" >> "
                    "$DIR/log\n" +
                    script + "\n");
    std::filesystem::permissions(hook, std::filesystem::perms::owner_all);
    return {.command = hook.string(),
            .timeout = timeout,
            .run = "runs/a",
            .retries = {.max_calls = max_calls, .first_pause = milliseconds(1)}};
  }

  TempFolder folder_;
  ReleaseDriver driver_;
};

TEST(ReleaseDriver, CallsTheHookOnceWithWhoHasGone) {
  Driven driven("echo all well");
  driven.release();
  driven.poll_until_idle();
  EXPECT_EQ(driven.log(), "1.1 node2 node0,node1 4,5 0,1,2,3 runs/a\n");
  EXPECT_EQ(driven.outcomes, Outcomes{kDone});
  EXPECT_EQ(driven.lines[0], "release 1: ranks 4-5 on node2: given back: all well");
  EXPECT_TRUE(driven->parked().empty());
}

TEST(ReleaseDriver, CallsAgainWhatIsNotNow) {
  Driven driven("[ $DYNMO_RELEASE_CALL -le 3 ] && echo busy && exit 75; exit 0");
  driven.release();
  driven.poll_until_idle();
  EXPECT_EQ(driven.outcomes, (Outcomes{kNotNow, kNotNow, kNotNow, kDone}));
  EXPECT_NE(
      driven.lines[1].find("release 1: ranks 4-5 on node2: not now, call 3 of 6 in 0.002 s: "),
      std::string::npos)
      << driven.lines[1];
  EXPECT_NE(driven.lines[1].find(": it ended with exit code 75: busy"), std::string::npos);
  EXPECT_NE(driven.log().find("\n1.4 node2 "), std::string::npos) << driven.log();
}

TEST(ReleaseDriver, ParksWhatIsNeverNow) {
  Driven driven("exit 75", 3);
  driven.release();
  driven.poll_until_idle();
  EXPECT_EQ(driven.outcomes, (Outcomes{kNotNow, kNotNow, kParked}));
  ASSERT_EQ(driven->parked().size(), 1U);
  EXPECT_EQ(driven->parked()[0].calls, 3);
}

// Before another process calls the hooks: the one that runs ends, and no other begins.
TEST(ReleaseDriver, HoldsTheHooksThatHaveNotBegun) {
  Driven driven("exit 0");
  driven.release();
  driven.note(driven->poll());
  driven.release();
  while (driven->runs_hook()) driven.note(driven->poll(Hooks::kHold));
  EXPECT_EQ(driven.outcomes, Outcomes{kDone});
  EXPECT_TRUE(driven->poll(Hooks::kHold).empty());
  EXPECT_FALSE(driven->runs_hook());
  EXPECT_EQ(driven->open().waiting.size(), 1U);
  driven.poll_until_idle();
  EXPECT_EQ(driven.outcomes, (Outcomes{kDone, kDone}));
}

TEST(ReleaseDriver, ParksAHookThatRunsTooLongForAProcessThatLeaves) {
  Driven driven("sleep 1000");
  driven->limit_hook(milliseconds(0));  // none runs
  driven.release();
  driven.note(driven->poll());
  driven->limit_hook(minutes(60));
  EXPECT_TRUE(driven->poll(Hooks::kHold).empty());
  driven->limit_hook(milliseconds(0));
  while (driven->runs_hook()) driven.note(driven->poll(Hooks::kHold));
  EXPECT_EQ(driven.outcomes, Outcomes{kParked});
  EXPECT_NE(driven.lines[0].find("it was stopped"), std::string::npos) << driven.lines[0];
  EXPECT_EQ(driven->open().parked.size(), 1U);
}

TEST(ReleaseDriver, ParksEveryOtherFailureInOneLine) {
  Driven driven("echo first; echo 'no rights' >&2; exit 77");
  driven.release();
  driven.poll_until_idle();
  EXPECT_EQ(driven.outcomes, Outcomes{kParked});
  EXPECT_NE(driven.lines[0].find("release 1: ranks 4-5 on node2: parked, not given back: hook '"),
            std::string::npos)
      << driven.lines[0];
  EXPECT_NE(driven.lines[0].find("': it ended with exit code 77: no rights"), std::string::npos);
  EXPECT_EQ(driven.lines[0].find('\n'), std::string::npos);
  EXPECT_EQ(driven->parked().size(), 1U);
}

TEST(ReleaseDriver, ParksAHookThatHangs) {
  Driven driven("exec sleep 1000", 6, milliseconds(200));
  driven.release();
  driven.poll_until_idle();
  EXPECT_EQ(driven.outcomes, Outcomes{kParked});
  EXPECT_NE(driven.lines[0].find("it took longer than 0.2 s and was stopped"), std::string::npos)
      << driven.lines[0];
}

TEST(ReleaseDriver, ParksWhatCannotBeStarted) {
  ReleaseDriver driver({.command = "no-such-program"});
  driver.release(members({{1, "a"}}), members({{0, "a"}}));
  const auto first = driver.poll();
  EXPECT_TRUE(first.empty());
  const auto news = driver.finish(minutes(2));
  ASSERT_EQ(news.size(), 1U);
  EXPECT_EQ(news[0].line,
            "release 1: rank 1: parked, not given back: hook 'no-such-program': the program "
            "'no-such-program' is not in PATH");
}

TEST(ReleaseDriver, WithoutAHookRanksJustEnd) {
  ReleaseDriver driver({});
  driver.release(members({{2, "b"}, {3, "b"}, {5, "c"}}), members({{0, "a"}}));
  const auto news = driver.poll();
  ASSERT_EQ(news.size(), 1U);
  EXPECT_EQ(news[0].outcome, kDone);
  EXPECT_EQ(news[0].line, "release 1: ranks 2-3, 5 on b, c ended");
  EXPECT_TRUE(driver.is_idle());
}

TEST(ReleaseDriver, SaysWhereHostsHaveRanksLeft) {
  Driven driven("");
  driven->release(members({{1, "node0"}}), members({{0, "node0"}}));
  driven.poll_until_idle();
  EXPECT_EQ(driven.lines[0], "release 1: rank 1: ended, ranks are left on the same hosts");
  EXPECT_EQ(driven.log(), "1.1  node0 1 0 runs/a\n");
}

TEST(ReleaseDriver, CallsForEachReleaseBeforeTheRunEnds) {
  Driven driven("exit 0");
  for (int i = 0; i < 3; ++i) driven.release();
  driven.note(driven->finish(minutes(2)));
  EXPECT_EQ(driven.outcomes, (Outcomes{kDone, kDone, kDone}));
}

TEST(ReleaseDriver, StopsTheHookThatOutlastsTheRun) {
  Driven driven("echo $$ > $DIR/pid; exec sleep 1000");
  driven.release();
  driven.release();
  driven.note(driven->finish(milliseconds(100)));
  EXPECT_EQ(driven.outcomes, (Outcomes{kParked, kParked}));
  EXPECT_NE(driven.lines[0].find("it was stopped"), std::string::npos) << driven.lines[0];
  EXPECT_NE(driven.lines[1].find("the run has ended before its hook was called"), std::string::npos)
      << driven.lines[1];
  EXPECT_TRUE(driven->is_idle());
  EXPECT_EQ(driven->parked().size(), 2U);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
}

TEST(ReleaseDriver, StopsTheHookOfARunThatIsInAHurry) {
  Driven driven("exec sleep 1000");
  driven.release();
  driven.note(driven->finish(minutes(60), [asked = 0]() mutable { return ++asked > 2; }));
  EXPECT_EQ(driven.outcomes, Outcomes{kParked});
  EXPECT_NE(driven.lines[0].find("it was stopped"), std::string::npos) << driven.lines[0];
}

TEST(ReleaseDriver, DoesNotWaitForAnotherCallWhenTheRunEnds) {
  const TempFolder folder;
  const auto hook = folder.write("hook", "#!/bin/sh\nexit 75\n");
  std::filesystem::permissions(hook, std::filesystem::perms::owner_all);
  ReleaseDriver driver(
      {.command = hook.string(),
       .retries = {.first_pause = std::chrono::hours(1), .max_pause = std::chrono::hours(1)}});
  driver.release(members({{1, "b"}}), members({{0, "a"}}));
  const auto news = driver.finish(minutes(2));
  ASSERT_EQ(news.size(), 2U);
  EXPECT_EQ(news[0].outcome, kNotNow);
  EXPECT_EQ(news[1].line,
            "release 1: rank 1 on b: parked, the run has ended before its hook was called again");
}

TEST(ReleaseDriver, TwoHundredReleasesLeaveNothingBehind) {
  const auto descriptors = [] {
    const std::filesystem::directory_iterator first("/proc/self/fd");
    return std::distance(begin(first), end(first));
  };
  Driven driven("exit $((DYNMO_RELEASE % 2 * 75))", 2);
  driven.release();
  driven.poll_until_idle();
  const auto before = descriptors();
  for (int i = 0; i < samples(200); ++i) {
    driven.release();
    driven.poll_until_idle();
  }
  EXPECT_EQ(descriptors(), before);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(driven->parked().size(), static_cast<std::size_t>(samples(200) / 2 + 1));
}

}  // namespace
}  // namespace dynmo::elastic
