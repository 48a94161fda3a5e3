// SPDX-License-Identifier: Apache-2.0
// Control planes of several ranks in one process. Ranks that die or stop are in ranks_test.cpp.
#include "dynmo/elastic/control_plane.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <future>
#include <thread>

#include "dynmo/process/ending.h"
#include "dynmo/process/peer_connection.h"
#include "dynmo/process/sockets.h"

namespace dynmo::elastic {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kPlaneTime{20000};

std::shared_ptr<ControlPlane> plane_of(int rank, milliseconds silence = milliseconds(4000)) {
  return ControlPlane::start({.id = MemberId{static_cast<std::uint64_t>(rank) + 1},
                              .period = milliseconds(10),
                              .silence = silence});
}

WatchOptions options_of(int rank, int size) {
  return {.generation = 3, .rank = WorldRank(rank), .size = size};
}

// All ranks of a group. `heard[rank]` is what the rank's callback was given.
struct Watch {
  explicit Watch(int size) : heard(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) planes.push_back(plane_of(rank));
    EXPECT_TRUE(planes[0]->listen("127.0.0.1"));
    for (int rank = 0; rank < size; ++rank) {
      WatchOptions options = options_of(rank, size);
      options.on_verdict = [this, rank](const Error& why) {
        heard[static_cast<std::size_t>(rank)].set_value(why);
      };
      watches.push_back(rank == 0
                            ? planes[0]->open(options)
                            : plane(rank).join(options, planes[0]->place(), kPlaneTime).value());
    }
  }
  [[nodiscard]] ControlPlane& plane(int rank) { return *planes[static_cast<std::size_t>(rank)]; }
  // The process of that rank ends.
  void kill(int rank) {
    planes[static_cast<std::size_t>(rank)].reset();
    watches[static_cast<std::size_t>(rank)].reset();
  }
  [[nodiscard]] Error verdict_of(int rank) {
    auto future = heard[static_cast<std::size_t>(rank)].get_future();
    if (future.wait_for(kPlaneTime) != std::future_status::ready) return {};
    return future.get();
  }

  std::vector<std::promise<Error>> heard;
  std::vector<std::shared_ptr<ControlPlane>> planes;
  std::vector<std::unique_ptr<GroupWatch>> watches;
};

const Error kLostRank2{ErrorCode::kPeerLost, "rank 2 was lost: its connection closed"};

TEST(ControlPlane, NamesTheRankWhoseConnectionClosedToAll) {
  Watch watch(4);
  EXPECT_FALSE(watch.watches[1]->verdict_within(milliseconds(50)));
  watch.kill(2);
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(watch.verdict_of(rank), kLostRank2);
    EXPECT_EQ(watch.watches[static_cast<std::size_t>(rank)]->verdict(), kLostRank2);
  }
}

TEST(ControlPlane, LossOfRank0IsSeenByAll) {
  Watch watch(3);
  watch.kill(0);
  for (const int rank : {1, 2}) {
    EXPECT_EQ(watch.verdict_of(rank).message, "rank 0 was lost: its connection closed");
  }
}

TEST(ControlPlane, TheFirstVerdictStaysWhenOthersFollow) {
  Watch watch(4);
  watch.kill(2);
  (void)watch.verdict_of(0);
  watch.kill(1);
  EXPECT_EQ(watch.verdict_of(3), kLostRank2);
  watch.kill(0);
  EXPECT_FALSE(watch.watches[3]->leave(milliseconds(10)));
  EXPECT_EQ(watch.watches[3]->verdict(), kLostRank2);
}

TEST(ControlPlane, AReasonIsToldInsteadOfALoss) {
  Watch watch(3);
  const Error why{ErrorCode::kNoCheckpoint, "no checkpoint"};
  watch.watches[1]->announce(why);
  watch.kill(1);
  for (const int rank : {0, 2}) {
    EXPECT_EQ(watch.verdict_of(rank), (Error{ErrorCode::kNoCheckpoint, "rank 1: no checkpoint"}));
  }
}

TEST(ControlPlane, ALossThatARankPassesOnIsNotItsOwn) {
  Watch watch(3);
  const Error why{ErrorCode::kPeerLost, "rank 2 was lost: Gloo said so"};
  watch.watches[0]->announce(why);
  EXPECT_EQ(watch.watches[0]->verdict(), why);
  EXPECT_EQ(watch.verdict_of(1), why);
  EXPECT_EQ(watch.verdict_of(2), why);
}

TEST(ControlPlane, RanksLeaveTogetherAndAreNotMissed) {
  Watch watch(3);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&watch, rank] {
      std::this_thread::sleep_for(milliseconds(20 * rank));
      EXPECT_TRUE(watch.watches[static_cast<std::size_t>(rank)]->leave(kPlaneTime));
    });
  }
  threads.clear();
  watch.kill(0);
  EXPECT_FALSE(watch.watches[1]->verdict_within(milliseconds(50)));
  watch.kill(1);
  EXPECT_FALSE(watch.watches[2]->verdict_within(milliseconds(50)));
}

TEST(ControlPlane, LeavingFailsWithTheVerdictOrAtItsDeadline) {
  Watch watch(3);
  const auto late = watch.watches[1]->leave(milliseconds(20));
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::kPeerLost);
  watch.kill(2);
  const auto lost = watch.watches[1]->leave(kPlaneTime);
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error(), kLostRank2);
}

TEST(ControlPlane, ARankThatHasFinishedMayEndBeforeTheOthers) {
  Watch watch(3);
  EXPECT_FALSE(watch.watches[1]->leave(milliseconds(100)));  // the others are not done
  watch.kill(1);
  EXPECT_FALSE(watch.watches[0]->verdict_within(milliseconds(100)));
  EXPECT_FALSE(watch.watches[2]->verdict());
}

TEST(ControlPlane, WhatARankTellsReachesAllAlsoThoseThatComeLater) {
  std::vector<std::unique_ptr<GroupWatch>> watches;
  const auto leader = plane_of(0);
  ASSERT_TRUE(leader->listen("127.0.0.1"));
  watches.push_back(leader->open(options_of(0, 3)));
  const auto connect = [&](int rank) {
    watches.push_back(
        plane_of(rank)->join(options_of(rank, 3), leader->place(), kPlaneTime).value());
  };
  connect(1);
  const std::string large(1 << 20, 'x');
  watches[1]->tell("large", large);
  watches[0]->tell("mine", std::string("\0\n", 2));
  EXPECT_TRUE(watches[1]->wait_for({"mine", "large"}, kPlaneTime).value());
  EXPECT_TRUE(watches[0]->wait_for({"large"}, kPlaneTime).value());
  connect(2);
  EXPECT_TRUE(watches[2]->wait_for({"mine", "large"}, kPlaneTime).value());
  for (const auto& watch : watches) {
    EXPECT_EQ(watch->told("large"), large);
    EXPECT_EQ(watch->told("mine"), std::string("\0\n", 2));
    EXPECT_EQ(watch->told("nothing"), std::nullopt);
    EXPECT_FALSE(watch->wait_for({"mine", "nothing"}, milliseconds(0)).value());
  }
  EXPECT_EQ(watches[2]->local_address(), "127.0.0.1");
}

// One connection carries both groups: the second ends while the first goes on.
TEST(ControlPlane, GroupsOfTheSamePlanesAreApart) {
  Watch watch(3);
  const auto next_of = [](int rank) {
    WatchOptions options = options_of(rank, 3);
    options.generation = 4;
    return options;
  };
  std::vector<std::unique_ptr<GroupWatch>> next;
  for (const int rank : {2, 1}) {  // before rank 0 opens it
    next.push_back(
        watch.plane(rank).join(next_of(rank), watch.plane(0).place(), kPlaneTime).value());
    next.back()->tell(std::to_string(rank), "early");
  }
  next.push_back(watch.plane(0).open(next_of(0)));
  next[0]->tell("key", "of the next group");
  for (const auto& one : next) {
    EXPECT_TRUE(one->wait_for({"key", "1", "2"}, kPlaneTime).value());
  }
  EXPECT_EQ(watch.watches[1]->told("key"), std::nullopt);
  next[0]->announce({ErrorCode::kPeerLost, "the next group is given up"});
  EXPECT_TRUE(next[1]->verdict_within(kPlaneTime));
  EXPECT_TRUE(next[2]->verdict_within(kPlaneTime));
  next.clear();
  watch.watches[1]->tell("key", "of the first");
  EXPECT_TRUE(watch.watches[2]->wait_for({"key"}, kPlaneTime).value());
  // The number serves again: what is left of the other group disturbs it nowhere.
  next.push_back(watch.plane(0).open(next_of(0)));
  next.push_back(watch.plane(1).join(next_of(1), watch.plane(0).place(), kPlaneTime).value());
  next[1]->tell("key", "of another group");
  EXPECT_TRUE(next[0]->wait_for({"key"}, kPlaneTime).value());
  EXPECT_FALSE(next[0]->verdict());
  for (const auto& one : watch.watches) EXPECT_FALSE(one->verdict());
}

TEST(ControlPlane, AGroupThatRank0HasGivenUpIsNotWaitedFor) {
  Watch watch(2);
  WatchOptions options = options_of(0, 2);
  options.generation = 4;
  watch.plane(0).open(options).reset();
  options.rank = WorldRank(1);
  const auto late = watch.plane(1).join(options, watch.plane(0).place(), kPlaneTime).value();
  EXPECT_TRUE(late->verdict_within(kPlaneTime));
  EXPECT_FALSE(watch.watches[1]->verdict());
}

TEST(ControlPlane, WhoWaitsForAWordHearsOfALossInstead) {
  Watch watch(3);
  auto waiting = std::async(std::launch::async,
                            [&] { return watch.watches[1]->wait_for({"of rank 2"}, kPlaneTime); });
  watch.kill(2);
  const auto heard = waiting.get();
  ASSERT_FALSE(heard);
  EXPECT_EQ(heard.error(), kLostRank2);
}

// The bytes of a process that says hello, and that it is that rank of the group.
std::string hello_of(std::uint64_t secret, int rank) {
  const process::Join join{.generation = 3, .rank = WorldRank(rank)};
  return process::encode(process::Hello{.secret = secret, .member = 9}) +
         process::encode(process::FrameType::kJoin, {1, process::text_of(join)});
}

// A socket that says hello as rank 1 and then nothing, like a stopped process.
TEST(ControlPlane, NamesASilentRank) {
  const auto plane = plane_of(0, milliseconds(200));
  ASSERT_TRUE(plane->listen("127.0.0.1"));
  WatchOptions options = options_of(0, 3);
  std::promise<Error> heard;
  options.on_verdict = [&](const Error& why) { heard.set_value(why); };
  const auto watch = plane->open(options);
  const auto begin = std::chrono::steady_clock::now();
  const auto socket = process::connect_to("127.0.0.1", plane->place().port, begin + kPlaneTime);
  ASSERT_TRUE(socket);
  const std::string hello = hello_of(plane->place().secret, 1);
  ASSERT_EQ(send(socket->get(), hello.data(), hello.size(), 0), std::ssize(hello));
  const Error why = heard.get_future().get();
  EXPECT_TRUE(why.message.starts_with("rank 1 was lost: nothing was heard of it for "))
      << why.message;
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(200));
}

TEST(ControlPlane, DoesNotListenToStrangers) {
  Watch watch(2);
  const auto deadline = std::chrono::steady_clock::now() + kPlaneTime;
  const std::uint64_t secret = watch.plane(0).place().secret;
  const std::vector<std::string> wrong = {
      "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
      hello_of(secret + 1, 1),
      hello_of(secret, 1),  // a rank that is there already
      hello_of(secret, 9),  // no rank of the group
      process::encode(process::FrameType::kVerdict,
                      {1, process::text_of(Error{ErrorCode::kPeerLost, "x"})}),  // before its hello
      process::encode(process::Hello{.secret = secret, .member = 9}) +
          process::encode(process::FrameType::kJoin, "short"),
      std::string("\xff\xff\xff\xff", 4),
      std::string("\0\0\0\0", 4)};
  for (const std::string& bytes : wrong) {
    const auto socket = process::connect_to("127.0.0.1", watch.plane(0).place().port, deadline);
    ASSERT_TRUE(socket);
    process::make_prompt(*socket);
    ASSERT_EQ(send(socket->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), std::ssize(bytes));
    char byte = 0;
    ssize_t got = -1;
    // One that knows the secret is greeted before its connection closes.
    while (got != 0 && errno != ECONNRESET && std::chrono::steady_clock::now() < deadline) {
      got = recv(socket->get(), &byte, 1, 0);
      errno = got < 0 ? errno : 0;
    }
    EXPECT_LE(got, 0) << "rank 0 keeps an unknown process";
  }
  EXPECT_FALSE(watch.watches[0]->verdict());
  EXPECT_FALSE(watch.watches[1]->verdict());
}

TEST(ControlPlane, AnswersWhoAsksForItsMember) {
  Watch watch(2);
  ASSERT_TRUE(watch.plane(1).listen("127.0.0.1"));
  const PlanePlace place = watch.plane(1).place();
  const auto ask = [&](const PlanePlace& where, int rank, milliseconds time = kPlaneTime) {
    return watch.plane(0).ask(where, MemberId{static_cast<std::uint64_t>(rank) + 1}, time);
  };
  EXPECT_EQ(ask(place, 1).fate, Fate::kAlive);
  EXPECT_EQ(ask(place, 1).notice, "");
  const std::string notice(std::size_t{1} << 20, 'n');  // above what an unknown process may send
  watch.plane(1).post(notice);
  EXPECT_EQ(ask(place, 1).fate, Fate::kAlive);
  EXPECT_EQ(ask(place, 1).notice, notice);
  EXPECT_EQ(ask(place, 7).fate, Fate::kDead) << "another member listens there";
  EXPECT_FALSE(watch.watches[0]->verdict()) << "who asks is no rank";

  watch.kill(1);
  EXPECT_EQ(ask(place, 1).fate, Fate::kDead);
  // A stopped process: its host takes the connection, and nobody answers.
  const auto silent = process::listen_on("127.0.0.1", 0);
  ASSERT_TRUE(silent);
  const PlanePlace stopped{
      .address = "127.0.0.1", .port = process::local_port(*silent), .secret = place.secret};
  EXPECT_EQ(ask(stopped, 1, milliseconds(50)).fate, Fate::kSilent);
  // Another run's plane: it does not say who it is.
  const auto other = plane_of(1);
  ASSERT_TRUE(other->listen("127.0.0.1"));
  EXPECT_EQ(ask(other->place(), 1, milliseconds(500)).fate, Fate::kSilent);
}

// A process of its own, another one of which keeps the connection open: that of a killed process
// closes late.
TEST(ControlPlane, SeesAWatchedProcessEndBeforeItsConnectionCloses) {
  std::array<int, 2> place_pipe{};
  std::array<int, 2> keeper_pipe{};  // also ends the keeper
  ASSERT_EQ(pipe(place_pipe.data()), 0);
  ASSERT_EQ(pipe(keeper_pipe.data()), 0);
  const pid_t child = fork();  // before this process has other threads
  if (child == 0) {
    PlanePlace place{.address = "127.0.0.1"};
    if (read(place_pipe[0], &place.port, sizeof place.port) < 0) _exit(1);
    if (read(place_pipe[0], &place.secret, sizeof place.secret) < 0) _exit(1);
    const auto plane = plane_of(1);
    const auto watch = plane->join(options_of(1, 2), place, kPlaneTime);
    const pid_t keeper = fork();
    if (keeper == 0) {
      char byte = 0;
      close(place_pipe[1]);
      _exit(static_cast<int>(read(place_pipe[0], &byte, 1)));  // until the test has ended
    }
    if (!watch || write(keeper_pipe[1], &keeper, sizeof keeper) < 0) _exit(1);
    while (true) pause();
  }
  close(place_pipe[0]);
  const auto plane = plane_of(0);
  ASSERT_TRUE(plane->listen("127.0.0.1"));
  std::promise<Error> heard;
  WatchOptions options = options_of(0, 2);
  options.on_verdict = [&heard](const Error& why) { heard.set_value(why); };
  const auto watch = plane->open(options);
  const PlanePlace place = plane->place();
  ASSERT_GT(write(place_pipe[1], &place.port, sizeof place.port), 0);
  ASSERT_GT(write(place_pipe[1], &place.secret, sizeof place.secret), 0);
  pid_t keeper = -1;
  ASSERT_GT(read(keeper_pipe[0], &keeper, sizeof keeper), 0);
  const bool is_seen = static_cast<bool>(process::end_of_thread(child, "dynmo-plane"));
  plane->watch({{.id = MemberId{2}, .number = 1, .pid = child}});
  kill(child, SIGKILL);
  auto future = heard.get_future();
  const bool in_time = future.wait_for(kPlaneTime) == std::future_status::ready;
  const Error why = in_time ? future.get() : Error{};
  kill(keeper, SIGKILL);
  waitpid(child, nullptr, 0);
  for (const int end : {place_pipe[1], keeper_pipe[0], keeper_pipe[1]}) close(end);
  if (!is_seen) GTEST_SKIP() << "this system does not tell of the end of a thread";
  EXPECT_EQ(why.message, "rank 1 was lost: its connection closed");
}

TEST(ControlPlane, NobodyListeningIsALossOfRank0) {
  PlanePlace place{.address = "127.0.0.1"};
  {
    const auto listener = process::listen_on("127.0.0.1", 0);
    place.port = process::local_port(*listener);
  }
  const auto watch = plane_of(1)->join(options_of(1, 2), place, milliseconds(50));
  ASSERT_FALSE(watch);
  EXPECT_TRUE(watch.error().message.starts_with("rank 0 was lost: no heartbeat connection to"));
}

}  // namespace
}  // namespace dynmo::elastic
