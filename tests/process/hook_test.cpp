// SPDX-License-Identifier: Apache-2.0
// Hooks are shells. Times are limits of what hangs and decide nothing, but for hooks that must be
// killed, which have a short one.
#include "dynmo/process/hook.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "dynmo/core/check.h"
#include "tests/support/process.h"
#include "tests/support/samples.h"
#include "tests/support/temp_folder.h"

namespace dynmo::process {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
constexpr milliseconds kHookTime = minutes(2);

HookCall shell(const std::string& script) {
  return {.command = {"sh", "-c", script}, .limit = minutes(10)};
}

HookResult result_of(const HookCall& call) {
  HookRunner runner;
  runner.start(call);
  return runner.wait(kHookTime).value_or(HookResult{.reason = "it has not ended"});
}

// Until `done`, or two minutes have passed.
bool await(const std::function<bool()>& done) {
  const auto deadline = Clock::now() + kHookTime;
  while (!done()) {
    if (Clock::now() > deadline) return false;
    usleep(1000);
  }
  return true;
}

// A number that a hook has written to a file.
pid_t read_pid(const std::filesystem::path& path) {
  pid_t pid = 0;
  EXPECT_TRUE(await([&] { return std::ifstream(path) >> pid && pid > 0; })) << path;
  return pid;
}

std::ptrdiff_t entries(const char* folder) {
  const std::filesystem::directory_iterator first(folder);
  return std::distance(begin(first), end(first));
}

TEST(Hook, GivesItsExitCodeAndWhatItPrints) {
  HookCall call = shell("echo one; echo \"two $DYNMO_HOOK_TEST $HOME\" >&2; exit 3");
  call.environment = {{"DYNMO_HOOK_TEST", "of three"}, {"HOME", "elsewhere"}};
  const HookResult result = result_of(call);
  EXPECT_EQ(result.end, HookEnd::kExited);
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.reason, "it ended with exit code 3");
  EXPECT_EQ(result.output, "one\ntwo of three elsewhere\n");
  EXPECT_EQ(last_line(result), "two of three elsewhere");
  EXPECT_EQ(result_of(shell("exit 0")).exit_code, 0);
}

// It ends only when the caller, who has started it and asked for its result, goes on.
TEST(Hook, DoesNotHoldItsCallerUp) {
  const TempFolder folder;
  HookRunner runner;
  EXPECT_FALSE(runner.poll());
  HookCall call = shell("while ! [ -e go ]; do sleep 0.01; done");
  call.command[2].insert(0, "cd '" + folder.path().string() + "'; ");
  runner.start(call);
  EXPECT_TRUE(runner.is_running());
  EXPECT_FALSE(runner.poll());
  EXPECT_FALSE(runner.wait(milliseconds(10)));
  folder.write("go", "");
  const auto result = runner.wait(kHookTime);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->exit_code, 0) << result->reason;
  EXPECT_FALSE(runner.is_running());
  EXPECT_FALSE(runner.poll());
}

TEST(Hook, HasNothingOfThisProcessButItsEnvironment) {
  const int inherited = open("/dev/null", O_RDONLY);  // not closed on exec
  sigset_t blocked, before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  const auto ignored = signal(SIGPIPE, SIG_IGN);
  const HookResult result = result_of(
      shell("ls /proc/$$/fd; cat; [ $(cut -d' ' -f5 /proc/$$/stat) = $$ ] && echo a group; "
            "grep -E '^Sig(Blk|Ign):' /proc/self/status"));
  signal(SIGPIPE, ignored);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  close(inherited);
  const std::string expected = "0\n1\n2\na group\nSigBlk:\t0000000000000000\nSigIgn:\t";
  ASSERT_TRUE(result.output.starts_with(expected)) << result.output;
  // The C library ignores two signals of its own.
  const auto mask = std::strtoull(result.output.c_str() + expected.size(), nullptr, 16);
  EXPECT_EQ(mask >> (SIGPIPE - 1) & 1, 0U) << result.output;
}

TEST(Hook, ThatHangsIsStoppedAfterItsLimit) {
  HookCall call = shell("echo before; exec sleep 1000");
  call.limit = milliseconds(200);
  call.grace = kHookTime;
  const HookResult result = result_of(call);
  EXPECT_EQ(result.end, HookEnd::kTimedOut);
  EXPECT_EQ(result.reason, "it took longer than 0.2 s and was stopped");
}

TEST(Hook, ThatIsDeafIsKilledWithWhatItHasStarted) {
  const TempFolder folder;
  const std::string here = folder.path().string();
  HookRunner runner;
  HookCall call = shell("trap '' TERM; sleep 1000 & echo $! > " + here + "/child; echo $$ > " +
                        here + "/itself; while :; do sleep 0.05; done");
  call.grace = milliseconds(50);
  runner.start(call);
  const pid_t child = read_pid(folder.path() / "child");
  const pid_t itself = read_pid(folder.path() / "itself");
  runner.stop();
  const auto result = runner.wait(kHookTime);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->end, HookEnd::kStopped);
  EXPECT_EQ(result->reason, "it was stopped");
  EXPECT_FALSE(is_running(itself));
  EXPECT_TRUE(await([&] { return !is_running(child); }));
}

TEST(Hook, ThatHearsItMayEndInItsOwnWay) {
  const TempFolder folder;
  HookRunner runner;
  HookCall call = shell("trap 'echo bye; exit 7' TERM; echo $$ > " + folder.path().string() +
                        "/itself; while :; do sleep 0.01; done");
  call.grace = minutes(10);
  runner.start(call);
  (void)read_pid(folder.path() / "itself");
  runner.stop();
  const auto result = runner.wait(kHookTime);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->end, HookEnd::kExited);
  EXPECT_EQ(result->exit_code, 7);
  EXPECT_EQ(last_line(*result), "bye");
}

TEST(Hook, IsKilledWithItsRunner) {
  const TempFolder folder;
  pid_t itself = 0;
  {
    HookRunner runner;
    runner.start(shell("trap '' TERM; echo $$ > " + folder.path().string() +
                       "/itself; while :; do sleep 0.05; done"));
    itself = read_pid(folder.path() / "itself");
  }
  EXPECT_FALSE(is_running(itself));
  EXPECT_EQ(waitpid(itself, nullptr, WNOHANG), -1);  // no zombie either
}

TEST(Hook, ThatCannotBeStartedSaysWhy) {
  const TempFolder folder;
  const std::string not_executable = folder.write("hook", "#!/bin/sh\n").string();
  for (const std::string& program :
       {std::string("no-such-program"), std::string("/no/such/program"), not_executable}) {
    const HookResult result = result_of({.command = {program}});
    EXPECT_EQ(result.end, HookEnd::kNotStarted);
    EXPECT_NE(result.reason.find(program), std::string::npos) << result.reason;
    const auto check = check_program(program);
    ASSERT_FALSE(check);
    EXPECT_NE(check.error().message.find(program), std::string::npos) << check.error().message;
  }
  EXPECT_TRUE(check_program("sh"));
  const auto is_folder = check_program("/tmp/");
  ASSERT_FALSE(is_folder);
  EXPECT_EQ(is_folder.error().message, "'/tmp/' is a folder, wanted a program");
}

TEST(Hook, ThatIsKilledNamesTheSignal) {
  const HookResult result = result_of(shell("kill -9 $$"));
  EXPECT_EQ(result.end, HookEnd::kKilled);
  EXPECT_EQ(result.reason, "it was killed by signal 9 (Killed)");
}

TEST(Hook, OfManyWordsIsRememberedByTheLast) {
  const HookResult result =
      result_of(shell("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done"));
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_EQ(result.output.size(), kHookOutput);
  EXPECT_EQ(last_line(result), "line 19999");
}

TEST(Hook, LastLineIsFitForLogs) {
  EXPECT_EQ(last_line({.output = ""}), "");
  EXPECT_EQ(last_line({.output = "a\nb c\n \n\t\n"}), "b c");
  EXPECT_EQ(last_line({.output = "50 %\r100 %\r"}), "100 %");
  EXPECT_EQ(last_line({.output = "a\tb\x1b[1m\xc3\xa4"}), "a b [1m??");
  EXPECT_EQ(last_line({.output = std::string(1000, 'x')}), std::string(200, 'x'));
}

TEST(Hook, LeavesSigchldToItsOwner) {
  const auto before = signal(SIGCHLD, SIG_IGN);  // the system reaps all children
  const HookResult result = result_of(shell("exit 0"));
  EXPECT_EQ(signal(SIGCHLD, before), SIG_IGN);
  EXPECT_EQ(result.end, HookEnd::kKilled);
  EXPECT_NE(result.reason.find("its exit code is unknown"), std::string::npos) << result.reason;
}

// Beside other threads, as in a training.
TEST(Hook, TwoHundredLeaveNothingBehind) {
  const std::jthread other([](const std::stop_token& stop) {
    while (!stop.stop_requested()) usleep(1000);
  });
  (void)result_of(shell("exit 0"));
  const auto descriptors = entries("/proc/self/fd");
  const auto threads = entries("/proc/self/task");
  for (int i = 0; i < samples(200); ++i) {
    HookRunner runner;
    runner.start(i % 5 == 4 ? HookCall{.command = {"no-such-program"}} : shell("echo a & exit 1"));
    if (i % 5 == 3) continue;  // it is killed
    if (i % 5 == 2) runner.stop();
    ASSERT_TRUE(runner.wait(kHookTime)) << i;
  }
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
  // A thread that was joined may be on its way out of the system still, that of the first one too.
  EXPECT_TRUE(await([&] { return entries("/proc/self/task") <= threads; }));
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(Hook, OneAtATime) {
  HookRunner runner;
  runner.start(shell("exec sleep 1000"));
  EXPECT_THROW(runner.start(shell("exit 0")), CheckFailure);
}

}  // namespace
}  // namespace dynmo::process
