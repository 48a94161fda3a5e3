// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/leader.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "dynmo/elastic/job_file.h"
#include "dynmo/process/late_ranks.h"
#include "dynmo/process/sockets.h"
#include "tests/support/no_free_descriptor.h"
#include "tests/support/temp_folder.h"

namespace dynmo::elastic {
namespace {

using process::LineClient;

constexpr std::chrono::milliseconds kAnswerTime{20000};

class LeaderTest : public testing::Test {
 protected:
  Leader::Options options() const {
    Leader::Options options;
    options.service = {.run = folder_.path(),
                       .leader = member(0),
                       .config = "",
                       .build = [] { return Build(); },
                       .first_member = 3};
    options.releases = {.command = "true", .run = folder_.path().string()};
    return options;
  }
  static Member member(int number) {
    return {.id = {static_cast<std::uint64_t>(number) + 1},
            .number = number,
            .host = process::host_name(),
            .pid = 1};
  }
  static View view(const std::vector<int>& numbers) {
    View view;
    for (const int number : numbers) view.members.push_back(member(number));
    return view;
  }
  std::unique_ptr<Leader> open(const Json& handover = nullptr) const {
    auto leader = Leader::open(options(), handover);
    EXPECT_TRUE(leader) << leader.error().message;
    return leader ? *std::move(leader) : nullptr;
  }
  // Its request waits for the training loop when this returns.
  LineClient ask(const Leader& leader, RequestKind kind, int ranks = 0) const {
    auto client = LineClient::connect("127.0.0.1", leader.endpoint().port, kAnswerTime);
    EXPECT_TRUE(client);
    const auto secret = read_secret(secret_path(folder_.path()));
    EXPECT_TRUE(secret &&
                client->send(to_line(Request{.kind = kind, .secret = *secret, .ranks = ranks})));
    while (!leader.has_requests()) std::this_thread::yield();
    return *std::move(client);
  }
  static Reply answer_to(LineClient& client) {
    const auto line = client.receive(kMaxReply, kAnswerTime);
    EXPECT_TRUE(line) << line.error().message;
    const auto reply = line ? parse_reply(*line) : Expected<Reply>(line.error());
    EXPECT_TRUE(reply);
    return reply ? *reply : Reply();
  }

  TempFolder folder_;
};

TEST_F(LeaderTest, LeadsThoughItsFilesCannotBeWrittenAndTriesAgain) {
  const std::filesystem::path job = job_path(folder_.path());
  std::filesystem::create_directories(job / "in the way");
  const auto leader = open();
  ASSERT_TRUE(leader);
  const auto published = leader->publish();
  ASSERT_FALSE(published);
  EXPECT_EQ(published.error().code, ErrorCode::kBadInput);
  EXPECT_NE(published.error().message.find("job.json"), std::string::npos);
  EXPECT_TRUE(leader->poll().empty());
  std::filesystem::remove_all(job);
  const BoundaryEvents events = leader->poll();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_NE(events.front().line.find("job.json"), std::string::npos);
  EXPECT_EQ(*read_job(folder_.path()), leader->endpoint());
  EXPECT_TRUE(leader->poll().empty());
}

TEST_F(LeaderTest, FilesOfAnotherLeaderStayWhereThisOneHasPublishedNone) {
  const auto leader = open();
  ASSERT_TRUE(leader && leader->publish());
  open().reset();  // one that was to lead next, in a change that did not come about
  EXPECT_EQ(*read_job(folder_.path()), leader->endpoint());
}

TEST_F(LeaderTest, TheNextLeaderKnowsWhatThisOneKnew) {
  const auto leader = open();
  ASSERT_TRUE(leader && leader->publish());
  leader->set_step({{"step", 7}, {"loss", 0.5}});
  leader->set_group(view({0, 1, 2}), plan::make_plan({2, 2, 2}, schedule::ScheduleKind::k1F1B));
  leader->note_change(view({0, 1, 2}), view({0, 1}), 0, "");
  const Json handover = leader->handover();
  EXPECT_EQ(handover.at("releases").size(), 1U);
  EXPECT_EQ(handover.at("next_member"), 3);
  const auto next = open(handover);
  ASSERT_TRUE(next && next->publish());
  EXPECT_EQ(next->handover(), handover);
  leader->retire(next->endpoint());
  EXPECT_TRUE(leader->finish(kLastHooks).empty()) << "the next one calls the hook";
  const BoundaryEvents events = next->finish(kLastHooks);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events.front().kind, "release");
  EXPECT_EQ(events.front().json.at("ranks"), Json({2}));
  EXPECT_EQ(*read_job(folder_.path()), next->endpoint());
}

// The process leads on after a loss of other ranks, and so does the hook that it has called.
TEST_F(LeaderTest, AHookThatRunsStaysWithTheProcess) {
  const std::filesystem::path kept = folder_.path() / "kept";
  const std::filesystem::path hook = folder_.path() / "hook";
  std::ofstream(hook) << "#!/bin/sh\nsleep 0.3\necho \"$DYNMO_KEPT_RANKS\" >> " << kept.string()
                      << "\n[ -e " << hook.string() << ".again ] || { touch " << hook.string()
                      << ".again; exit 75; }\n";
  std::filesystem::permissions(hook, std::filesystem::perms::owner_all);
  Leader::Options mine = options();
  mine.releases.command = hook.string();
  mine.releases.retries = {.first_pause = std::chrono::milliseconds(1)};
  auto leader = *Leader::open(mine, nullptr);
  ASSERT_TRUE(leader->publish());
  leader->note_change(view({0, 1, 2, 3}), view({0, 1, 2}), 0, "");
  EXPECT_TRUE(leader->poll().empty()) << "the hook has begun";
  auto next = *Leader::open(mine, leader->handover());
  ASSERT_TRUE(next->publish());
  next->take_releases(*leader);
  leader->retire(next->endpoint());
  leader.reset();
  next->note_change(view({0, 2}), view({0, 2}), 0, "");  // rank 1 was lost
  BoundaryEvents events;
  while (events.size() < 2) std::ranges::move(next->poll(), std::back_inserter(events));
  EXPECT_EQ(events[0].json.at("outcome"), "not now");
  EXPECT_EQ(events[1].json.at("outcome"), "done");
  std::ifstream file(kept);
  std::string first;
  std::string second;
  file >> first >> second;
  EXPECT_EQ(first, "0,1,2");
  EXPECT_EQ(second, "0,2");
}

TEST_F(LeaderTest, AHandoverThatIsNoneIsRefused) {
  for (const char* text : {"{}", "[]", R"({"secret":1,"next_member":2,"releases":[]})"}) {
    EXPECT_FALSE(Leader::open(options(), Json::parse(text))) << text;
  }
}

TEST_F(LeaderTest, WhatItDoesAloneIsNoRequestToAllRanks) {
  const auto leader = open();
  ASSERT_TRUE(leader && leader->publish());
  LineClient grows = ask(*leader, RequestKind::kGrow, 1);
  RankRequest mine;
  leader->take_requests(mine);
  EXPECT_TRUE(mine.requests.empty());
  EXPECT_FALSE(answer_to(grows).done) << "no launcher has started this process";
  LineClient releases = ask(*leader, RequestKind::kRelease);
  leader->take_requests(mine);
  EXPECT_TRUE(mine.requests.empty());
  EXPECT_EQ(answer_to(releases).text, "no release is parked");
  LineClient packs = ask(*leader, RequestKind::kPack, 2);
  leader->take_requests(mine);
  ASSERT_EQ(mine.requests.size(), 1U);
  EXPECT_EQ(mine.requests.front().ranks, 2);
  leader->answer(mine.requests.front().client, done("packed"));
  EXPECT_EQ(answer_to(packs).text, "packed");
}

TEST_F(LeaderTest, CountsRanksToStartAgain) {
  std::array<int, 2> ends{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const process::UniqueFd of_leader(ends[0]);
  const process::UniqueFd of_launcher(ends[1]);
  setenv(process::kLauncherFd, std::to_string(ends[0]).c_str(), 1);
  const auto leader = open();
  for (const int code : {5, 2, 0, 137, 130}) process::tell_leader_ended(ends[1], code);
  EXPECT_TRUE(leader->poll().empty());
  unsetenv(process::kLauncherFd);
  EXPECT_EQ(leader->take_failed_starts(), 2) << "one had lost the others, one was killed";
  EXPECT_EQ(leader->take_failed_starts(), 0);
}

TEST_F(LeaderTest, WhoWaitsForACheckpointHearsOfItOnce) {
  const auto leader = open();
  ASSERT_TRUE(leader && leader->publish());
  for (const bool written : {true, false}) {
    LineClient client = ask(*leader, RequestKind::kCheckpoint);
    RankRequest mine;
    leader->take_requests(mine);
    ASSERT_EQ(mine.requests.size(), 1U);
    leader->wait_for_checkpoint({mine.requests.front().client});
    EXPECT_TRUE(leader->awaits_checkpoint());
    leader->answer_checkpoints(written ? Expected<void>()
                                       : make_error(ErrorCode::kBadInput, "the disk is full"));
    EXPECT_FALSE(leader->awaits_checkpoint());
    const Reply reply = answer_to(client);
    EXPECT_EQ(reply.done, written);
    EXPECT_EQ(reply.text, written ? "the checkpoint is written" : "the disk is full");
  }
}

TEST_F(LeaderTest, SaysOnceThatClientsWaitForDescriptors) {
  const auto leader = open();
  process::UniqueFd last(::dup(STDERR_FILENO));
  BoundaryEvents events;
  {
    const NoFreeDescriptor none;
    last.reset();  // for the client
    const auto client = LineClient::connect("127.0.0.1", leader->endpoint().port, kAnswerTime);
    ASSERT_TRUE(client);
    for (int i = 0; i < 60000 && events.empty(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      events = leader->poll();
    }
  }
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].line,
            "dynmo ctl and joins: new connections wait: Too many open files; close some, or raise "
            "the limit of open files (ulimit -n)");
  EXPECT_TRUE(leader->poll().empty());
}

}  // namespace
}  // namespace dynmo::elastic
