// SPDX-License-Identifier: Apache-2.0
// The launcher with shells as ranks. Ranks that talk to each other are in ranks_test.cpp.
#include "dynmo/process/launcher.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <tuple>

#include "dynmo/process/late_ranks.h"
#include "dynmo/process/processors.h"
#include "tests/support/process.h"

namespace dynmo::process {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;

// In a process of its own, which takes the signals. The script has a folder $DIR of the run for its
// ranks to wait for each other in: `await NAME` waits for a file, `await_end RANK` for the end of a
// rank that has called `enter`.
class Shells : public Process {
 public:
  struct How {
    std::vector<int> cores = {};
    milliseconds grace{5000};
    std::string late = {};  // script of ranks that come later
    std::string address = LaunchOptions().address;
    bool survives = false;
  };
  Shells(int ranks, const std::string& script) : Shells(ranks, script, How()) {}
  Shells(int ranks, const std::string& script, const How& how)
      : Process([&] {
          std::string folder = std::filesystem::temp_directory_path() / "dynmo-launcher-XXXXXX";
          if (mkdtemp(folder.data()) == nullptr) return 98;
          LaunchOptions options;
          options.ranks = ranks;
          options.command = {"sh", "-c", kHelpers + script};
          options.environment = {{"DIR", folder}};
          options.cores = how.cores;
          options.address = how.address;
          options.grace = how.grace;
          options.survives = how.survives;
          options.interrupt_grace = how.grace;
          if (!how.late.empty()) options.late_command = {"sh", "-c", kHelpers + how.late};
          const auto code = launch_ranks(options);
          std::filesystem::remove_all(folder);
          return code ? *code : 99;
        }) {}

 private:
  inline static const std::string kHelpers =
      "await() { while ! [ -e $DIR/$1 ]; do sleep 0.01; done; }; "
      "enter() { echo $$ > $DIR/new$RANK; mv $DIR/new$RANK $DIR/rank$RANK; }; "
      "await_end() { await rank$1; while grep -q 'State:.[^Z]' /proc/$(cat $DIR/rank$1)/status; do "
      "sleep 0.01; done 2> /dev/null; }; ";
};

TEST(Launcher, GivesEachRankItsEnvironment) {
  unsetenv("OMP_NUM_THREADS");
  setenv("MKL_NUM_THREADS", "7", 1);
  setenv("RANK", "5", 1);
  Shells run(2,
             "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $OMP_NUM_THREADS $MKL_NUM_THREADS "
             "$((MASTER_PORT > 1023)) >&2");
  unsetenv("RANK");
  unsetenv("MKL_NUM_THREADS");
  EXPECT_EQ(run.wait(), 0);
  EXPECT_NE(run.output().find("0 0 2 127.0.0.1 1 7 1\n"), std::string::npos) << run.output();
  EXPECT_NE(run.output().find("[rank 1] 1 1 2 127.0.0.1 1 7 1\n"), std::string::npos)
      << run.output();
}

TEST(Launcher, HasRanksMeetWhereItIsTold) {
  Shells run(2, "echo $RANK meets at $MASTER_ADDR >&2", {.address = "127.0.0.2"});
  EXPECT_EQ(run.wait(), 0);
  EXPECT_NE(run.output().find("0 meets at 127.0.0.2\n"), std::string::npos) << run.output();
  EXPECT_NE(run.output().find("[rank 1] 1 meets at 127.0.0.2\n"), std::string::npos)
      << run.output();
}

TEST(Launcher, HandsRank0AListeningSocketOnThePort) {
  // Connecting works though no rank listens itself, and rank 1 has no such descriptor.
  Shells run(2,
             "if [ $RANK = 0 ]; then readlink /proc/self/fd/$DYNMO_STORE_FD | grep -q socket; "
             "else [ -z \"$DYNMO_STORE_FD\" ]; fi");
  EXPECT_EQ(run.wait(), 0) << run.output();
}

TEST(Launcher, PassesStdoutOfRank0OnUnchanged) {
  Shells run(2, "printf 'step 1\\rstep 2 of rank '$RANK");
  ASSERT_EQ(run.wait(), 0);
  EXPECT_NE(run.output().find("step 1\rstep 2 of rank 0"), std::string::npos) << run.output();
  EXPECT_NE(run.output().find("[rank 1] step 1\rstep 2 of rank 1\n"), std::string::npos)
      << run.output();
}

TEST(Launcher, PinsRankIToTheIthCore) {
  const std::vector<int> cores = usable_processors().cores;
  Shells run(2, "echo $(grep Cpus_allowed_list /proc/self/status) >&2", {.cores = cores});
  ASSERT_EQ(run.wait(), 0);
  EXPECT_NE(
      run.output().find(fmt::format("[rank 1] Cpus_allowed_list: {}\n", cores[1 % cores.size()])),
      std::string::npos)
      << run.output();
}

TEST(Launcher, ReturnsTheCodeOfTheFirstFailure) {
  // Rank 1 fails; the others find out and end with 5.
  Shells run(3,
             "enter; if [ $RANK = 1 ]; then echo 'dynmo: bad' >&2; exit 3; fi; await_end 1; "
             "echo 'dynmo: rank 1: bad' >&2; exit 5");
  EXPECT_EQ(run.wait(), 3);
  EXPECT_EQ(run.output(), "[rank 1] dynmo: bad\n");
}

// (sh redirects to descriptors of one digit only.)
constexpr const char* kAsk = "ask() { bash -c \"printf '%s' '$1' >&$DYNMO_LAUNCHER_FD\"; }; ";

TEST(Launcher, StartsRanksThatARankAsksFor) {
  Shells run(2, std::string(kAsk) + "if [ $RANK = 1 ]; then ask 'wanted 2'; fi; await a; await b",
             {.late = "[ -z \"$RANK$WORLD_SIZE$MASTER_ADDR$MASTER_PORT\" ] || exit 9; "
                      "mkdir $DIR/a 2> /dev/null || mkdir $DIR/b"});
  EXPECT_EQ(run.wait(), 0) << run.output();
  // One that is no rank yet ends nothing; nor does a request that is none.
  Shells failed(
      1, std::string(kAsk) + "ask 'wanted'; ask 'wanted 0'; ask 'met 1'; ask 'wanted 1'; await a",
      {.late = "mkdir $DIR/a; echo 'dynmo: bad' >&2; exit 3"});
  EXPECT_EQ(failed.wait(), 0) << failed.output();
  EXPECT_EQ(failed.output(), "[rank 1] dynmo: bad\n");
}

TEST(Launcher, ARankThatCameLaterCountsOnceItHasJoined) {
  Shells run(
      1, std::string(kAsk) + "ask 'wanted 1'; sleep 100",
      {.grace = milliseconds(100), .late = std::string(kAsk) + "ask \"met $$ 7\"; kill -9 $$"});
  EXPECT_EQ(run.wait(), 5) << run.output();
  EXPECT_EQ(run.output(), "dynmo: rank 7 was killed by signal 9 (Killed)\n");
  // Also when the first ranks have left.
  Shells left(1, std::string(kAsk) + "ask 'wanted 1'; await a",
              {.late = std::string(kAsk) + "ask \"met $$ 3\"; mkdir $DIR/a; sleep 0.05; exit 4"});
  EXPECT_EQ(left.wait(), 4) << left.output();
}

// It may wait for a leader longer than the run lives.
TEST(Launcher, EndsAProcessThatIsNoRankAfterTheLastRank) {
  Shells waits(1, std::string(kAsk) + "ask 'wanted 1'; await a",
               {.grace = milliseconds(1), .late = "mkdir $DIR/a; sleep 1000"});
  EXPECT_EQ(waits.wait(), 0) << waits.output();
  // It is a rank, and says so only now.
  Shells joins(1, std::string(kAsk) + "enter; ask \"met $$ 0\"; ask 'wanted 1'; await a",
               {.grace = milliseconds(2000),
                .late = std::string(kAsk) +
                        "mkdir $DIR/a; await_end 0; ask \"met $$ 1\"; sleep 2.5; echo on >&2",
                .survives = true});
  EXPECT_EQ(joins.wait(), 0) << joins.output();
  EXPECT_NE(joins.output().find("[rank 1] on\n"), std::string::npos) << joins.output();
}

// Nothing of a rank that has ended stays with the launcher while the others go on.
TEST(Launcher, KeepsNoProcessOrDescriptorOfRanksThatHaveEnded) {
  Shells run(1,
             std::string(kAsk) +
                 "count() { echo $(ls /proc/$PPID/fd | wc -l) "
                 "$(grep -l \"^PPid:.$PPID\\$\" /proc/[0-9]*/status 2> /dev/null | wc -l); }; "
                 "one() { rm -rf $DIR/a; ask 'wanted 1'; await a; }; "
                 "before=$(count); set -- $before; for i in 1 2 3 4 5 6 7 8 9 10; do one; done; "
                 "for i in $(seq 1000); do now=$(count); [ ${now% *} -le $1 ] && [ ${now#* } -le "
                 "$2 ] && exit 0; sleep 0.02; done; "
                 "echo \"$before, then $(count)\" >&2; exit 9",
             {.late = "mkdir $DIR/a"});
  EXPECT_EQ(run.wait(), 0) << run.output();
}

TEST(Launcher, TellsWhoHasAskedThatARankHasEndedBeforeItWasOne) {
  for (const auto& [end, code] : {std::pair("exit 3", 3), std::pair("kill -9 $$", 137)}) {
    Shells run(1,
               std::string(kAsk) +
                   "ask 'wanted 1'; bash -c \"dd bs=64 count=1 status=none <&$DYNMO_LAUNCHER_FD\"",
               {.late = end});
    EXPECT_EQ(run.wait(), 0) << run.output();
    EXPECT_NE(run.output().find(fmt::format("ended {}", code)), std::string::npos) << run.output();
  }
}

TEST(Launcher, EndsHooksOfRanksThatWereKilledWithTheRun) {
  for (const char* hook : {"sleep 1000", "sh -c \"trap '' TERM; sleep 1000; sleep 1000\""}) {
    Shells run(1,
               std::string(kAsk) + "setsid " + hook +
                   " > /dev/null 2>&1 < /dev/null & ask \"hook $!\"; echo \"hook $!\"; kill -9 $$",
               {.late = "true"});
    EXPECT_EQ(run.wait(), 5) << run.output();
    const std::size_t at = run.output().find("hook ");
    ASSERT_NE(at, std::string::npos) << run.output();
    const pid_t pid = std::stoi(run.output().substr(at + 5));
    const auto begin = Clock::now();
    while (is_running(pid) && seconds_since(begin) < 60) usleep(1000);  // the system reaps it
    EXPECT_FALSE(is_running(pid)) << hook;
  }
}

TEST(Launcher, RequestsOfRanksAreReadOrRefusedWhole) {
  const auto wanted = parse_launch_request("wanted 12");
  ASSERT_TRUE(wanted);
  EXPECT_EQ(std::get<WantedRanks>(*wanted).ranks, 12);
  const auto met = parse_launch_request("met 4321 7");
  ASSERT_TRUE(met);
  EXPECT_EQ(std::get<MetRank>(*met).pid, 4321);
  EXPECT_EQ(std::get<MetRank>(*met).number, 7);
  const auto hook = parse_launch_request("hook 4321");
  ASSERT_TRUE(hook);
  EXPECT_EQ(std::get<StartedHook>(*hook).pid, 4321);
  for (const char* text : {"",          "wanted",        "wanted ",   "wanted 0",
                           "wanted -1", "wanted 4097",   "wanted 1 ", "wanted 99999999999",
                           "met",       "met 1",         "met 1 ",    "met 1 x",
                           "met 1 2 3", "wantedmet 1 2", "hook",      "hook 0",
                           "hook 1",    "hook -5",       "hook 5 6",  "ended 3"}) {
    EXPECT_FALSE(parse_launch_request(text)) << text;
  }
}

TEST(Launcher, PutsTheCauseBeforeThoseWhoFoundItFirst) {
  Shells killed(2, "enter; if [ $RANK = 1 ]; then await_end 0; kill -9 $$; fi; exit 5");
  EXPECT_EQ(killed.wait(), 5);
  EXPECT_NE(killed.output().find("dynmo: rank 1 was killed by signal 9 (Killed)\n"),
            std::string::npos)
      << killed.output();
  Shells failed(2, "enter; if [ $RANK = 1 ]; then await_end 0; exit 3; fi; exit 5");
  EXPECT_EQ(failed.wait(), 3);
}

// Ranks 1 and 2 are seen to end at once. Rank 0, which rank 2 names, ends later.
TEST(Launcher, PutsTheCauseBeforeThoseWhoEndWhileItWaits) {
  Shells run(3,
             "enter; if [ $RANK = 0 ]; then await rank1; await rank2; kill -STOP $PPID; touch "
             "$DIR/stopped; await_end 1; "
             "await_end 2; kill -CONT $PPID; sleep 0.2; echo 'dynmo: rank 1: it is full' >&2; "
             "exit 4; fi; await stopped; "
             "if [ $RANK = 1 ]; then echo 'dynmo: it is full' >&2; exit 4; fi; "
             "echo 'dynmo: rank 0 was lost: its connection has ended' >&2; exit 5");
  EXPECT_EQ(run.wait(), 4);
  EXPECT_NE(run.output().find("[rank 1] dynmo: it is full\n"), std::string::npos) << run.output();
  EXPECT_EQ(run.output().find("rank 1: "), std::string::npos) << run.output();
}

// It speaks of a loss and ends while the launcher waits for the lost one's end.
TEST(Launcher, ReadsTheLastWordsOfARankBeforeItSaysHowItEnded) {
  Shells run(2,
             "if [ $RANK = 0 ]; then sleep 100; fi; echo 'dynmo: rank 0 was lost: silent' >&2; "
             "sleep 0.03; exit 5",
             {.grace = milliseconds(100)});
  EXPECT_EQ(run.wait(), 5);
  EXPECT_EQ(run.output(), "[rank 1] dynmo: rank 0 was lost: silent\n");
}

TEST(Launcher, EndsTheStubbornAndWhatTheyStarted) {
  Shells run(2,
             "if [ $RANK = 1 ]; then await trapped; exit 2; fi; trap '' TERM INT; sleep 1000 & "
             "echo pid $! >&2; echo pid $$ >&2; touch $DIR/trapped; while true; do sleep 0.05; "
             "done",
             {.grace = milliseconds(300)});
  EXPECT_EQ(run.wait(), 2);
  int pids = 0;
  for (std::size_t at = 0; (at = run.output().find("pid ", at)) != std::string::npos; ++at) {
    ++pids;
    EXPECT_FALSE(is_running(std::atoi(run.output().c_str() + at + 4))) << run.output();
  }
  EXPECT_EQ(pids, 2) << run.output();
}

// The code is that of the ranks that end last.
TEST(Launcher, LetsTheOthersGoOnWhereTheySurviveALoss) {
  for (const auto& [loss, others, code] :
       {std::tuple("kill -9 $$", "exit 0", 0), std::tuple("exit 1", "exit 0", 0),
        std::tuple("exit 5", "exit 0", 0),  // it was left out, or has hung
        std::tuple("kill -9 $$", "exit 4", 4), std::tuple("kill -9 $$", "exit 5", 5)}) {
    Shells run(3,
               fmt::format("enter; if [ $RANK = 0 ]; then {}; fi; await_end 0; sleep 0.1; "
                           "echo on >&2; touch $DIR/on$RANK; await on1; await on2; {}",
                           loss, others),
               {.grace = milliseconds(1), .survives = true});
    EXPECT_EQ(run.wait(), code) << run.output();
    EXPECT_NE(run.output().find("[rank 2] on\n"), std::string::npos) << run.output();
  }
  // A decision of all ends all.
  Shells ended(2, "enter; if [ $RANK = 0 ]; then exit 2; fi; sleep 1000",
               {.grace = milliseconds(1), .survives = true});
  EXPECT_EQ(ended.wait(), 2) << ended.output();
}

// Before they have met, they do not know that they wait for one that is lost.
TEST(Launcher, EndsTheOthersWhereOneIsLostBeforeTheyMet) {
  const std::string lost = "enter; if [ $RANK = 0 ]; then kill -9 $$; fi; await_end 0; ";
  Shells ended(3, kAsk + lost + "sleep 1000",
               {.grace = milliseconds(1), .late = "true", .survives = true});
  EXPECT_EQ(ended.wait(), 5) << ended.output();
  // One of them says only now that they did meet.
  Shells late(3, kAsk + lost + "sleep 0.1; ask \"met $$ $RANK\"; sleep 2.5; echo on >&2",
              {.grace = milliseconds(2000), .late = "true", .survives = true});
  EXPECT_EQ(late.wait(), 0) << late.output();
  EXPECT_NE(late.output().find("[rank 2] on\n"), std::string::npos) << late.output();
  Shells survived(3, kAsk + std::string("ask \"met $$ $RANK\"; ") + lost + "sleep 0.1; echo on >&2",
                  {.grace = milliseconds(1), .late = "true", .survives = true});
  EXPECT_EQ(survived.wait(), 0) << survived.output();
}

TEST(Launcher, AFinishedRankDoesNotEndTheOthers) {
  Shells run(
      3, "enter; if [ $RANK = 1 ]; then exit 0; fi; await_end 1; sleep 0.1; echo end $RANK >&2");
  EXPECT_EQ(run.wait(), 0);
  EXPECT_NE(run.output().find("[rank 2] end 2\n"), std::string::npos) << run.output();
}

TEST(Launcher, LetsRanksEndInTheirOwnWayAfterControlC) {
  Shells run(2,
             "trap 'echo stopped $RANK >&2; exit 130' INT; echo ready >&2; while true; do sleep "
             "0.02; done");
  ASSERT_TRUE(run.read_until(
      [](const std::string& output) { return output.find("ready") != output.rfind("ready"); }));
  kill(run.pid(), SIGINT);
  EXPECT_EQ(run.wait(), 130);
  EXPECT_NE(run.output().find("stopped 0\n"), std::string::npos) << run.output();
  EXPECT_NE(run.output().find("[rank 1] stopped 1\n"), std::string::npos) << run.output();
}

TEST(Launcher, ASecondControlCKillsAtOnce) {
  Shells run(2, "trap 'echo no >&2' INT TERM; echo ready >&2; while true; do sleep 0.02; done",
             {.grace = minutes(2)});
  ASSERT_TRUE(run.read_until(
      [](const std::string& output) { return output.find("ready") != output.rfind("ready"); }));
  kill(run.pid(), SIGINT);
  ASSERT_TRUE(run.read_until(
      [](const std::string& output) { return output.find("no\n") != std::string::npos; }));
  kill(run.pid(), SIGINT);
  const auto begin = Clock::now();
  EXPECT_EQ(run.wait(), 130);
  EXPECT_LT(seconds_since(begin), 60);  // of a grace of two minutes
}

// A signal that this process ignores, as the processes that it starts then do, while it lives.
class Ignored {
 public:
  explicit Ignored(int number) : number_(number), before_(std::signal(number, SIG_IGN)) {}
  Ignored(const Ignored&) = delete;
  Ignored& operator=(const Ignored&) = delete;
  ~Ignored() { std::signal(number_, before_); }

 private:
  int number_;
  void (*before_)(int);
};

TEST(Launcher, ControlCEndsAlsoAJobThatAScriptHasStartedInTheBackground) {
  const Ignored interrupt(SIGINT);  // as a shell that is no terminal's has it do
  Shells run(2, "echo ready >&2; exec sleep 60", {.grace = minutes(2)});
  ASSERT_TRUE(run.read_until(
      [](const std::string& output) { return output.find("ready") != output.rfind("ready"); }));
  const auto begin = Clock::now();
  kill(run.pid(), SIGINT);
  EXPECT_EQ(run.wait(), 130);
  EXPECT_LT(seconds_since(begin), 50);
}

TEST(Launcher, NohupKeepsItFromAHangup) {
  const Ignored hangup(SIGHUP);
  Shells run(1, "trap 'exit 3' USR2; echo pid $$. >&2; while true; do sleep 0.02; done");
  ASSERT_TRUE(run.read_until(
      [](const std::string& output) { return output.find(".\n") != std::string::npos; }));
  kill(run.pid(), SIGHUP);
  const std::size_t at = run.output().find("pid ");
  ASSERT_NE(at, std::string::npos) << run.output();
  kill(std::atoi(run.output().c_str() + at + 4), SIGUSR2);
  EXPECT_EQ(run.wait(), 3);
}

TEST(Launcher, ASignalThatComesWhenAllIsDoneHasInterruptedNothing) {
  Shells run(1, "trap 'exit 0' INT; echo ready >&2; while true; do sleep 0.02; done");
  ASSERT_TRUE(run.read_until(
      [](const std::string& output) { return output.find("ready") != std::string::npos; }));
  kill(run.pid(), SIGINT);
  EXPECT_EQ(run.wait(), 0);
}

TEST(Launcher, AMissingProgramIsBadInput) {
  for (const char* program : {"no-such-program", "/no/such/program"}) {
    LaunchOptions options;
    options.command = {program};
    const auto code = launch_ranks(options);
    ASSERT_FALSE(code);
    EXPECT_EQ(code.error().code, ErrorCode::kBadInput);
    EXPECT_NE(code.error().message.find(program), std::string::npos) << code.error().message;
  }
}

TEST(Launcher, ALotOfOutputArrivesWhole) {
  Shells run(2, "i=0; while [ $i -lt 2000 ]; do echo line $i of rank $RANK >&2; i=$((i+1)); done");
  ASSERT_EQ(run.wait(), 0);
  for (const char* line : {"\n[rank 1] line 1999 of rank 1\n", "\nline 1999 of rank 0\n"}) {
    EXPECT_NE(("\n" + run.output()).find(line), std::string::npos);
  }
  EXPECT_EQ(std::count(run.output().begin(), run.output().end(), '\n'), 4000);
}

}  // namespace
}  // namespace dynmo::process
