// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/control_service.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "dynmo/elastic/job_file.h"
#include "dynmo/process/sockets.h"
#include "tests/support/temp_folder.h"

namespace dynmo::elastic {
namespace {

using process::LineClient;

constexpr std::chrono::milliseconds kLong{20000};

class ControlServiceTest : public testing::Test {
 protected:
  void SetUp() override { open("127.0.0.1"); }
  void open(const std::string& group_address) {
    service_.reset();
    auto opened = ControlService::open({.run = folder_.path(),
                                        .group_address = group_address,
                                        .leader = {.id = {1}, .host = process::host_name()},
                                        .config = "",
                                        .build = [] { return Build(); },
                                        .first_member = 2});
    ASSERT_TRUE(opened) << opened.error().message;
    service_ = *std::move(opened);
    ASSERT_TRUE(service_->publish());
    const auto leader = find_leader(folder_.path().string(), "");
    ASSERT_TRUE(leader) << leader.error().message;
    port_ = leader->port;
  }

  LineClient ask(const Request& request) const {
    auto client = LineClient::connect("127.0.0.1", port_, kLong);
    EXPECT_TRUE(client && client->send(to_line(request)) && client->receive(kMaxReply, kLong));
    return client ? *std::move(client) : LineClient();
  }
  // The process waits to join when this returns.
  LineClient join(std::uint64_t id) const {
    return ask({.kind = RequestKind::kJoin,
                .secret = service_->secret(),
                .newcomer = {.id = {id}, .host = process::host_name(), .pid = 1}});
  }
  std::vector<LineClient> join_all(std::size_t count) {
    std::vector<LineClient> clients;
    while (clients.size() < count) clients.push_back(join(++last_id_));
    return clients;
  }
  void admit_all() {
    for (const Newcomer& newcomer : service_->newcomers()) {
      Place place;
      place.member = newcomer.member.number;
      service_->admit(newcomer.client, place);
    }
  }
  // The service has seen all that happened before: it looks for clients that have gone behind
  // each answer, so the second answer comes after such a look.
  void catch_up() const {
    for (int turn = 0; turn < 2; ++turn) {
      ask({.kind = RequestKind::kStatus, .secret = service_->secret()});
    }
  }

  TempFolder folder_;
  std::unique_ptr<ControlService> service_;
  std::uint16_t port_ = 0;
  std::uint64_t last_id_ = 0;
};

TEST_F(ControlServiceTest, WhoGoesAdmittedIsMissingUntilAllAreDismissed) {
  std::vector<LineClient> clients = join_all(2);
  admit_all();
  catch_up();
  EXPECT_FALSE(service_->missing());
  clients.back() = LineClient();
  catch_up();
  ASSERT_TRUE(service_->missing());
  EXPECT_EQ(service_->missing()->message, "rank 3 has gone before it had joined");
  service_->dismiss_admitted();
  EXPECT_FALSE(service_->missing());
}

TEST_F(ControlServiceTest, WhoStandsByMayGo) {
  std::vector<LineClient> clients = join_all(2);
  clients.front() = LineClient();
  catch_up();
  EXPECT_FALSE(service_->missing());
  ASSERT_EQ(service_->newcomers().size(), 1U);
  EXPECT_EQ(service_->newcomers().front().member.number, 3);
}

// The service learns only later that the connection before has ended.
TEST_F(ControlServiceTest, WhoComesAgainIsOneNewcomer) {
  std::vector<LineClient> clients;
  for (int times = 0; times < 2; ++times) clients.push_back(join(7));
  ASSERT_EQ(service_->newcomers().size(), 1U);
  EXPECT_EQ(service_->newcomers().front().member.number, 2);
  admit_all();
  EXPECT_FALSE(service_->missing());
  clients.push_back(join(7));  // it has not heard of its place
  ASSERT_TRUE(service_->missing());
  EXPECT_EQ(service_->missing()->message, "rank 2 has gone before it had joined");
  service_->dismiss_admitted();
  clients.erase(clients.begin(), clients.end() - 1);
  catch_up();
  EXPECT_FALSE(service_->missing());
  EXPECT_EQ(service_->newcomers().size(), 1U);
}

TEST_F(ControlServiceTest, OtherHostsAreRefusedWhereTheyDoNotReachTheGroup) {
  for (const std::string address : {"127.0.0.1", "192.0.2.1", "node-3"}) {
    open(address);
    auto client = LineClient::connect("127.0.0.1", port_, kLong);
    ASSERT_TRUE(client);
    ASSERT_TRUE(
        client->send(to_line(Request{.kind = RequestKind::kJoin,
                                     .secret = service_->secret(),
                                     .newcomer = {.id = {9}, .host = "another", .pid = 1}})));
    const auto line = client->receive(kMaxReply, kLong);
    ASSERT_TRUE(line);
    const auto reply = parse_reply(*line);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->done, address != "127.0.0.1") << *line;
    if (reply->done) continue;
    for (const char* part : {"'another' does not reach", "elastic.listen", "MASTER_ADDR"}) {
      EXPECT_NE(reply->text.find(part), std::string::npos) << reply->text;
    }
  }
}

TEST_F(ControlServiceTest, WhoWaitsHearsWhereTheNextLeaderIs) {
  LineClient waits = join(7);
  const std::string secret = service_->secret();
  const JobFile next{.address = "192.0.2.1", .port = 9, .host = "b", .pid = 3};
  ASSERT_TRUE(write_job(folder_.path(), next, secret));
  service_->hand_over(next);
  // It still listens, but what it knows of the run is old.
  auto asks = LineClient::connect("127.0.0.1", port_, kLong);
  ASSERT_TRUE(asks);
  ASSERT_TRUE(asks->send(to_line(Request{.kind = RequestKind::kStatus, .secret = secret})));
  const auto told = asks->receive(kMaxReply, kLong);
  ASSERT_TRUE(told) << told.error().message;
  EXPECT_EQ(parse_reply(*told)->leader, next);
  service_.reset();
  const auto line = waits.receive(kMaxReply, kLong);
  ASSERT_TRUE(line) << line.error().message;
  const auto reply = parse_reply(*line);
  ASSERT_TRUE(reply) << reply.error().message;
  EXPECT_FALSE(reply->done);
  EXPECT_TRUE(reply->again);
  EXPECT_EQ(reply->leader, next);
  EXPECT_EQ(*read_job(folder_.path()), next);  // and its file stays
}

// Newcomers close their connections as soon as they are ranks, while the leader dismisses them.
TEST_F(ControlServiceTest, NobodyIsMissingOnceDismissed) {
  for (int round = 0; round < 30; ++round) {
    std::vector<LineClient> clients = join_all(24);
    admit_all();
    std::thread leaving([&] { clients.clear(); });
    while (!service_->missing()) std::this_thread::yield();  // the first has gone
    service_->dismiss_admitted();
    leaving.join();
    catch_up();
    ASSERT_FALSE(service_->missing()) << service_->missing()->message << ", round " << round;
    ASSERT_TRUE(service_->newcomers().empty());
  }
}

}  // namespace
}  // namespace dynmo::elastic
