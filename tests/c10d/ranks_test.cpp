// SPDX-License-Identifier: Apache-2.0
// Ranks as real processes, and what is left when one of them dies.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cmath>
#include <map>
#include <memory>
#include <sstream>
#include <thread>

#include "dynmo/process/sockets.h"
#include "tests/support/process.h"

namespace dynmo::runtime {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kRanks = 3;
// Seconds from a loss to the end of all. It takes one or two; this finds a rank that waits for the
// lost one.
constexpr double kLongestEnd = 60;

// "ready RANK PID" in what the ranks print.
std::map<int, pid_t> ready_ranks(const std::string& output) {
  std::map<int, pid_t> ranks;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.find("ready ");
    int rank = 0;
    pid_t pid = 0;
    if (at != std::string::npos && std::istringstream(line.substr(at + 6)) >> rank >> pid) {
      ranks[rank] = pid;
    }
  }
  return ranks;
}

std::vector<std::string> lines_with(const std::string& output, const std::string& what) {
  std::vector<std::string> found;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    if (line.find(what) != std::string::npos) found.push_back(line);
  }
  return found;
}

testing::AssertionResult contains(const std::string& output, const std::string& what) {
  if (output.find(what) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "wanted \"" << what << "\" in:\n" << output;
}

std::unique_ptr<Process> launch(const std::string& scenario, int ranks = kRanks) {
  return std::make_unique<Process>(
      std::vector<std::string>{RANK_PROGRAM, "launch", std::to_string(ranks), scenario});
}

// The launcher and its ranks, once `count` of them are ready.
struct Launched {
  std::unique_ptr<Process> launcher;
  std::map<int, pid_t> ranks;
};

Launched launch_ready(const std::string& scenario, int count = kRanks) {
  Launched run{launch(scenario), {}};
  EXPECT_TRUE(run.launcher->read_until([count](const std::string& output) {
    return std::ssize(ready_ranks(output)) == count;
  })) << run.launcher->output();
  run.ranks = ready_ranks(run.launcher->output());
  return run;
}

void expect_nobody_left(const std::map<int, pid_t>& ranks) {
  for (const auto& [rank, pid] : ranks) {
    EXPECT_FALSE(is_running(pid)) << "rank " << rank << " still runs";
  }
}

struct Case {
  std::string scenario;
  int victim;
};

void PrintTo(const Case& which, std::ostream* stream) {
  *stream << which.scenario << ", rank " << which.victim;
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  return info.param.scenario + std::to_string(info.param.victim);
}

class KilledRank : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(, KilledRank,
                         testing::Values(Case{"rest", 0}, Case{"rest", 1}, Case{"rest", 2},
                                         Case{"stream", 0}, Case{"stream", 1}, Case{"stream", 2},
                                         Case{"pieces", 1}, Case{"compute", 2}),
                         case_name);

TEST_P(KilledRank, EndsTheRunWithItsNameAndCode5) {
  Launched run = launch_ready(GetParam().scenario);
  const int victim = GetParam().victim;
  const auto begin = Clock::now();
  kill(run.ranks[victim], SIGKILL);
  EXPECT_EQ(run.launcher->wait(), 5);
  EXPECT_LT(seconds_since(begin), kLongestEnd);
  const std::string& output = run.launcher->output();
  const std::vector<std::string> wanted = {
      fmt::format("dynmo: rank {} was killed by signal 9 (Killed)", victim)};
  EXPECT_EQ(lines_with(output, "dynmo:"), wanted) << output;
  expect_nobody_left(run.ranks);
}

// Ranks that another launcher has started: a free port, an environment, no launcher.
Environment environment_of(int rank, int size, std::uint16_t port) {
  return {{"RANK", std::to_string(rank)}, {"WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},   {"MASTER_PORT", std::to_string(port)},
          {"JOIN_SECONDS", "60"},         {"OMP_NUM_THREADS", "1"}};
}

// A port where nobody listens, and where a process that is told of it may. The system gives it to
// no other while this lives.
class HeldPort {
 public:
  HeldPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any), 0);
  }
  [[nodiscard]] std::uint16_t port() const { return process::local_port(socket_); }

 private:
  process::UniqueFd socket_;
};

// Once it waits for others to join.
std::unique_ptr<Process> start_waiting(Environment environment) {
  environment.emplace_back("SAY_WAITING", "1");
  auto rank = std::make_unique<Process>(std::vector<std::string>{RANK_PROGRAM, "messages"},
                                        std::move(environment));
  EXPECT_TRUE(rank->read_until([](const std::string& output) {
    return output.find("waiting ") != std::string::npos;
  })) << rank->output();
  return rank;
}

std::vector<std::unique_ptr<Process>> start_alone(const std::string& scenario,
                                                  const Environment& more = {}) {
  const HeldPort held;
  std::vector<std::unique_ptr<Process>> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    Environment environment = environment_of(rank, kRanks, held.port());
    environment.insert(environment.end(), more.begin(), more.end());
    ranks.push_back(std::make_unique<Process>(std::vector<std::string>{RANK_PROGRAM, scenario},
                                              std::move(environment)));
  }
  for (const auto& rank : ranks) {
    EXPECT_TRUE(rank->read_until([](const std::string& output) {
      return !ready_ranks(output).empty();
    })) << rank->output();
  }
  return ranks;
}

class KilledRankWithoutLauncher : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(, KilledRankWithoutLauncher,
                         testing::Values(Case{"rest", 0}, Case{"rest", 2}, Case{"stream", 0},
                                         Case{"stream", 1}),
                         case_name);

TEST_P(KilledRankWithoutLauncher, IsNamedByEveryOther) {
  const auto ranks = start_alone(GetParam().scenario);
  const int victim = GetParam().victim;
  const auto begin = Clock::now();
  kill(ranks[static_cast<std::size_t>(victim)]->pid(), SIGKILL);
  for (int rank = 0; rank < kRanks; ++rank) {
    Process& process = *ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(process.wait(), rank == victim ? -SIGKILL : 5);
    if (rank == victim) continue;
    const std::vector<std::string> wanted = {
        fmt::format("dynmo: rank {} was lost: its connection closed", victim)};
    EXPECT_EQ(lines_with(process.output(), "dynmo:"), wanted) << process.output();
  }
  EXPECT_LT(seconds_since(begin), kLongestEnd);
}

class StoppedRank : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(, StoppedRank, testing::Values(Case{"rest", 0}, Case{"stream", 2}),
                         case_name);

TEST_P(StoppedRank, IsNamedAfterThreeSeconds) {
  Launched run = launch_ready(GetParam().scenario);
  const int victim = GetParam().victim;
  const auto begin = Clock::now();
  kill(run.ranks[victim], SIGSTOP);
  const std::string wanted =
      fmt::format("dynmo: rank {} was lost: nothing was heard of it for ", victim);
  EXPECT_TRUE(run.launcher->read_until([&](const std::string& output) {
    return output.find(wanted) != std::string::npos;
  })) << run.launcher->output();
  EXPECT_EQ(run.launcher->wait(), 5);
  EXPECT_LT(seconds_since(begin), kLongestEnd);
  const auto lines = lines_with(run.launcher->output(), "dynmo:");
  ASSERT_EQ(lines.size(), 1U) << run.launcher->output();
  EXPECT_GE(std::stod(lines.front().substr(lines.front().find(wanted) + wanted.size())), 3.0);
  expect_nobody_left(run.ranks);
}

// A sleeper wakes up to a group that has gone on without it.
TEST(StoppedRanks, LearnsThatItIsOut) {
  for (const int victim : {0, 1}) {
    const auto ranks = start_alone("rest");
    kill(ranks[static_cast<std::size_t>(victim)]->pid(), SIGSTOP);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      EXPECT_EQ(ranks[static_cast<std::size_t>(rank)]->wait(), 5);
    }
    Process& sleeper = *ranks[static_cast<std::size_t>(victim)];
    kill(sleeper.pid(), SIGCONT);
    EXPECT_EQ(sleeper.wait(), 5);
    EXPECT_TRUE(contains(sleeper.output(),
                         fmt::format("rank {} was lost: nothing was heard of it", victim)));
  }
}

// A paused container: nobody is to blame.
TEST(StoppedRanks, IsNotMissedWhereAllWereStopped) {
  constexpr milliseconds kSilence{1000};
  const auto ranks =
      start_alone("compute", {{"SILENCE_MILLISECONDS", std::to_string(kSilence.count())}});
  for (const auto& rank : ranks) kill(rank->pid(), SIGSTOP);
  std::this_thread::sleep_for(2 * kSilence);  // the pause itself
  for (const auto& rank : ranks) kill(rank->pid(), SIGCONT);
  for (const auto& rank : ranks) {
    EXPECT_TRUE(rank->read_until([](const std::string& output) {
      return output.find("went on ") != std::string::npos;
    })) << rank->output();
  }
  kill(ranks[1]->pid(), SIGKILL);
  for (const std::size_t rank : {0U, 2U}) {
    EXPECT_EQ(ranks[rank]->wait(), 5);
    const std::vector<std::string> wanted = {"dynmo: rank 1 was lost: its connection closed"};
    EXPECT_EQ(lines_with(ranks[rank]->output(), "dynmo:"), wanted) << ranks[rank]->output();
  }
}

TEST(Ranks, ExchangeMessagesAndLargeTransfers) {
  for (const char* scenario : {"messages", "transfer", "leave-late"}) {
    const auto run = launch(scenario);
    EXPECT_EQ(run->wait(), 0) << run->output();
    EXPECT_TRUE(contains(run->output(), "done\n"));
    EXPECT_EQ(lines_with(run->output(), "dynmo:").size(), 0U) << run->output();
  }
}

TEST(Ranks, OneAloneNeedsNobody) {
  const auto run = launch("alone", 1);
  EXPECT_EQ(run->wait(), 0) << run->output();
  EXPECT_TRUE(contains(run->output(), "done\n"));
}

TEST(Ranks, SurvivorsFormTheNextGeneration) {
  const auto run = launch("rebuild");
  EXPECT_EQ(run->wait(), 5);  // rank 2 was killed; the launcher says so
  EXPECT_TRUE(contains(run->output(), "rebuilt after"));
  EXPECT_TRUE(contains(run->output(), "done\n"));
}

// As under torchrun, whose agent has the store; here it is that of other ranks.
TEST(Ranks, JoinThroughAStoreThatSomebodyElseHosts) {
  const HeldPort held;
  std::vector<std::unique_ptr<Process>> others;
  for (int rank = 0; rank < 2; ++rank) {
    others.push_back(std::make_unique<Process>(std::vector<std::string>{RANK_PROGRAM, "rest"},
                                               environment_of(rank, 2, held.port())));
  }
  for (const std::string attempt : {"0", "1"}) {
    std::vector<std::unique_ptr<Process>> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      auto environment = environment_of(rank, kRanks, held.port());
      environment.emplace_back("TORCHELASTIC_USE_AGENT_STORE", "True");
      environment.emplace_back("TORCHELASTIC_RESTART_COUNT", attempt);
      ranks.push_back(std::make_unique<Process>(std::vector<std::string>{RANK_PROGRAM, "messages"},
                                                environment));
    }
    for (const auto& rank : ranks) EXPECT_EQ(rank->wait(), 0) << rank->output();
  }
}

// Two ranks, of which one waits for a message of the other: in the group that has met through a
// store, and in one that has met as groups do when a run changes its size.
std::vector<std::unique_ptr<Process>> start_waiting_in_both_groups(const Environment& more) {
  std::vector<std::unique_ptr<Process>> ranks;
  for (const std::string scenario : {"wait", "wait-beside"}) {
    const HeldPort held;
    for (int rank = 0; rank < 2; ++rank) {
      auto environment = environment_of(rank, 2, held.port());
      environment.insert(environment.end(), more.begin(), more.end());
      ranks.push_back(std::make_unique<Process>(std::vector<std::string>{RANK_PROGRAM, scenario},
                                                std::move(environment)));
    }
    for (std::size_t i = ranks.size() - 2; i < ranks.size(); ++i) {  // the port is theirs
      EXPECT_TRUE(ranks[i]->read_until([](const std::string& output) {
        return !ready_ranks(output).empty();
      })) << ranks[i]->output();
    }
  }
  return ranks;
}

// A rank may have a reason to be busy for longer than a group has for forming.
TEST(Ranks, WaitForAMessageLongerThanForAGroup) {
  const auto ranks = start_waiting_in_both_groups(
      {{"JOIN_SECONDS", "8"}, {"MESSAGE_MILLISECONDS", "60000"}, {"PAUSE_MILLISECONDS", "8500"}});
  for (const auto& rank : ranks) EXPECT_EQ(rank->wait(), 0) << rank->output();
}

TEST(Ranks, GiveUpOnAMessageInTheirOwnTime) {
  const auto ranks =
      start_waiting_in_both_groups({{"JOIN_SECONDS", "30"}, {"MESSAGE_MILLISECONDS", "300"}});
  for (const auto& rank : ranks) EXPECT_EQ(rank->wait(), 5) << rank->output();
  for (const std::size_t waiting : {1U, 3U}) {
    const std::string& output = ranks[waiting]->output();
    const std::string wanted = "rank 0 was lost: no message passed for ";
    ASSERT_TRUE(contains(output, wanted));
    EXPECT_LT(std::stod(output.substr(output.find(wanted) + wanted.size())), 30);
  }
}

TEST(Ranks, TheirErrorComesFirstAndDecidesTheExitCode) {
  const auto run = launch("fail");
  EXPECT_EQ(run->wait(), 4);
  const std::vector<std::string> wanted = {"[rank 1] dynmo: no checkpoint in 'runs/x' verifies"};
  EXPECT_EQ(lines_with(run->output(), "dynmo:"), wanted) << run->output();
}

TEST(Ranks, ThatEndSilentlyAreNamed) {
  const auto vanished = launch("vanish");
  EXPECT_EQ(vanished->wait(), 7);
  EXPECT_EQ(lines_with(vanished->output(), "dynmo:"),
            std::vector<std::string>{"dynmo: rank 1 ended with exit code 7"});
  const auto left = launch("walk-away");
  EXPECT_EQ(left->wait(), 5);
  EXPECT_TRUE(contains(left->output(), "dynmo: rank 1 has left the group"));
}

TEST(Ranks, ADroppedOperationIsADefectThatEndsAll) {
  const auto run = launch("drop");
  EXPECT_EQ(run->wait(), 1);
  EXPECT_EQ(lines_with(run->output(), "dynmo:").size(), 1U) << run->output();
  EXPECT_TRUE(contains(run->output(), "dropped"));
}

TEST(Launcher, EndsAllOnControlC) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Launched run = launch_ready("stream");
    const auto begin = Clock::now();
    kill(run.launcher->pid(), signal);
    EXPECT_EQ(run.launcher->wait(), 130);
    EXPECT_LT(seconds_since(begin), kLongestEnd);
    EXPECT_EQ(lines_with(run.launcher->output(), "dynmo:").size(), 0U) << run.launcher->output();
    expect_nobody_left(run.ranks);
  }
}

TEST(Launcher, TakesItsRanksAlongWhenItIsKilled) {
  Launched run = launch_ready("stream");
  kill(run.launcher->pid(), SIGKILL);
  EXPECT_EQ(run.launcher->wait(), -SIGKILL);
  const auto begin = Clock::now();
  for (const auto& [rank, pid] : run.ranks) {
    while (is_running(pid) && seconds_since(begin) < kLongestEnd) usleep(1000);
  }
  expect_nobody_left(run.ranks);
}

TEST(Join, APortInUseIsNamed) {
  const auto taken = process::listen_on("127.0.0.1", 0);
  ASSERT_TRUE(taken);
  Process rank({RANK_PROGRAM, "messages"}, environment_of(0, 2, process::local_port(*taken)));
  EXPECT_EQ(rank.wait(), 2);
  EXPECT_TRUE(contains(rank.output(),
                       fmt::format("dynmo: port {} on 127.0.0.1 is in use: end the program that "
                                   "listens there; MASTER_PORT can be another one\n",
                                   process::local_port(*taken))))
      << rank.output();
}

TEST(Join, NobodyThereIsAnErrorAfterTheDeadline) {
  const HeldPort held;
  auto options = environment_of(1, 2, held.port());
  options.emplace_back("JOIN_SECONDS", "1");
  Process rank({RANK_PROGRAM, "messages"}, options);
  EXPECT_EQ(rank.wait(), 5);
  EXPECT_TRUE(contains(rank.output(), "dynmo: rank 1 found nobody at 127.0.0.1:"));
  EXPECT_EQ(lines_with(rank.output(), "").size(), 1U) << rank.output();
}

// Rank 0 is the last to come, so that the time that it gives to others is not theirs to start in.
TEST(Join, TheMissingAreNamed) {
  const HeldPort held;
  const std::vector<std::string> command = {RANK_PROGRAM, "messages"};
  auto options = environment_of(2, 4, held.port());
  options.emplace_back("SAY_WAITING", "1");
  Process second(command, options);
  EXPECT_TRUE(second.read_until([](const std::string& output) {
    return output.find("joins ") != std::string::npos;
  })) << second.output();
  options = environment_of(0, 4, held.port());
  std::erase_if(options, [](const auto& one) { return one.first == "JOIN_SECONDS"; });
  options.emplace_back("JOIN_SECONDS", "5");
  Process first(command, options);
  for (Process* rank : {&first, &second}) {
    EXPECT_EQ(rank->wait(), 5);
    EXPECT_TRUE(contains(rank->output(), "2 of 4 ranks did not join at 127.0.0.1:"));
    EXPECT_TRUE(contains(rank->output(), "within 5 s: 1, 3\n"));
    EXPECT_EQ(lines_with(rank->output(), "dynmo:").size(), 1U) << rank->output();
  }
}

TEST(Join, DifferentSizesAreRefusedByAll) {
  const HeldPort held;
  Process first({RANK_PROGRAM, "messages"}, environment_of(0, 2, held.port()));
  Process second({RANK_PROGRAM, "messages"}, environment_of(1, 3, held.port()));
  const auto begin = Clock::now();
  EXPECT_EQ(first.wait(), 2);
  EXPECT_EQ(second.wait(), 2);
  EXPECT_LT(seconds_since(begin), kLongestEnd);
  EXPECT_TRUE(contains(first.output() + second.output(), "give every rank the same WORLD_SIZE"));
}

TEST(Join, TwoProcessesOfOneRankAreRefused) {
  const HeldPort held;
  std::vector<std::unique_ptr<Process>> ranks;
  for (const int rank : {0, 1, 1}) {
    ranks.push_back(std::make_unique<Process>(std::vector<std::string>{RANK_PROGRAM, "messages"},
                                              environment_of(rank, 3, held.port())));
  }
  std::string output;
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank->wait(), 2);
    output += rank->output();
  }
  EXPECT_TRUE(contains(output, "two processes are rank 1"));
}

// Rank 2 never starts; rank 1 dies when it has joined.
TEST(Join, ALossWhileJoiningEndsAll) {
  const HeldPort held;
  const auto first = start_waiting(environment_of(0, 3, held.port()));
  const auto second = start_waiting(environment_of(1, 3, held.port()));
  kill(second->pid(), SIGKILL);
  EXPECT_EQ(first->wait(), 5);
  EXPECT_TRUE(contains(first->output(), "rank 1 was lost"));
}

}  // namespace
}  // namespace dynmo::runtime
