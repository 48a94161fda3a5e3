// SPDX-License-Identifier: Apache-2.0
// Watchdogs of several ranks in one process. Ranks that die or stop are in ranks_test.cpp.
#include "dynmo/process/watchdog.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <thread>

#include "dynmo/process/sockets.h"

namespace dynmo::process {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLong{20000};

WatchdogOptions options_of(int rank, int size) {
  return {.rank = WorldRank(rank),
          .size = size,
          .secret = 42,
          .period = milliseconds(10),
          .silence = milliseconds(4000)};
}

// All ranks of a group. `heard[rank]` is what the rank's callback was given.
struct Watch {
  explicit Watch(int size) : heard(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) {
      const auto on_verdict = [this, rank](const Error& why) {
        heard[static_cast<std::size_t>(rank)].set_value(why);
      };
      auto one = rank == 0 ? Watchdog::listen(options_of(0, size), "127.0.0.1", on_verdict)
                           : Watchdog::connect(options_of(rank, size), "127.0.0.1", dogs[0]->port(),
                                               on_verdict, kLong);
      dogs.push_back(std::move(one).value());
    }
  }
  [[nodiscard]] Error verdict_of(int rank) {
    auto future = heard[static_cast<std::size_t>(rank)].get_future();
    if (future.wait_for(kLong) != std::future_status::ready) return {};
    return future.get();
  }

  std::vector<std::promise<Error>> heard;
  std::vector<std::unique_ptr<Watchdog>> dogs;
};

const Error kLostRank2{ErrorCode::kPeerLost, "rank 2 was lost: its connection closed"};

TEST(Watchdog, NamesTheRankWhoseConnectionClosedToAll) {
  Watch watch(4);
  EXPECT_FALSE(watch.dogs[1]->verdict_within(milliseconds(50)));
  watch.dogs[2].reset();
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(watch.verdict_of(rank), kLostRank2);
    EXPECT_EQ(watch.dogs[static_cast<std::size_t>(rank)]->verdict(), kLostRank2);
  }
}

TEST(Watchdog, LossOfRank0IsSeenByAll) {
  Watch watch(3);
  watch.dogs[0].reset();
  for (const int rank : {1, 2}) {
    EXPECT_EQ(watch.verdict_of(rank).message, "rank 0 was lost: its connection closed");
  }
}

TEST(Watchdog, TheFirstVerdictStaysWhenOthersFollow) {
  Watch watch(4);
  watch.dogs[2].reset();
  (void)watch.verdict_of(0);
  watch.dogs[1].reset();
  EXPECT_EQ(watch.verdict_of(3), kLostRank2);
  watch.dogs[0].reset();
  EXPECT_FALSE(watch.dogs[3]->leave(milliseconds(10)));
  EXPECT_EQ(watch.dogs[3]->verdict(), kLostRank2);
}

TEST(Watchdog, AReasonIsToldInsteadOfALoss) {
  Watch watch(3);
  const Error why{ErrorCode::kNoCheckpoint, "no checkpoint"};
  watch.dogs[1]->announce(why);
  watch.dogs[1].reset();
  for (const int rank : {0, 2}) {
    EXPECT_EQ(watch.verdict_of(rank), (Error{ErrorCode::kNoCheckpoint, "rank 1: no checkpoint"}));
  }
}

TEST(Watchdog, ALossThatARankPassesOnIsNotItsOwn) {
  Watch watch(3);
  const Error why{ErrorCode::kPeerLost, "rank 2 was lost: Gloo said so"};
  watch.dogs[0]->announce(why);
  EXPECT_EQ(watch.dogs[0]->verdict(), why);
  EXPECT_EQ(watch.verdict_of(1), why);
  EXPECT_EQ(watch.verdict_of(2), why);
}

TEST(Watchdog, RanksLeaveTogetherAndAreNotMissed) {
  Watch watch(3);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&watch, rank] {
      std::this_thread::sleep_for(milliseconds(20 * rank));
      EXPECT_TRUE(watch.dogs[static_cast<std::size_t>(rank)]->leave(kLong));
    });
  }
  threads.clear();
  watch.dogs[0].reset();
  EXPECT_FALSE(watch.dogs[1]->verdict_within(milliseconds(50)));
  watch.dogs[1].reset();
  EXPECT_FALSE(watch.dogs[2]->verdict_within(milliseconds(50)));
}

TEST(Watchdog, LeavingFailsWithTheVerdictOrAtItsDeadline) {
  Watch watch(3);
  const auto late = watch.dogs[1]->leave(milliseconds(20));
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::kPeerLost);
  watch.dogs[2].reset();
  const auto lost = watch.dogs[1]->leave(kLong);
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error(), kLostRank2);
}

TEST(Watchdog, ARankThatHasFinishedMayEndBeforeTheOthers) {
  Watch watch(3);
  EXPECT_FALSE(watch.dogs[1]->leave(milliseconds(100)));  // the others are not done
  watch.dogs[1].reset();
  EXPECT_FALSE(watch.dogs[0]->verdict_within(milliseconds(100)));
  EXPECT_FALSE(watch.dogs[2]->verdict());
}

// A socket that says hello as rank 1 and then nothing, like a stopped process.
TEST(Watchdog, WhatARankTellsReachesAllAlsoThoseThatComeLater) {
  std::vector<std::unique_ptr<Watchdog>> dogs;
  const auto ignore = [](const Error&) {};
  dogs.push_back(Watchdog::listen(options_of(0, 3), "127.0.0.1", ignore).value());
  const auto connect = [&](int rank) {
    dogs.push_back(
        Watchdog::connect(options_of(rank, 3), "127.0.0.1", dogs[0]->port(), ignore, kLong)
            .value());
  };
  connect(1);
  const std::string large(1 << 20, 'x');
  dogs[1]->tell("large", large);
  dogs[0]->tell("mine", std::string("\0\n", 2));
  EXPECT_TRUE(dogs[1]->wait_for({"mine", "large"}, kLong).value());
  EXPECT_TRUE(dogs[0]->wait_for({"large"}, kLong).value());
  connect(2);
  EXPECT_TRUE(dogs[2]->wait_for({"mine", "large"}, kLong).value());
  for (const auto& dog : dogs) {
    EXPECT_EQ(dog->told("large"), large);
    EXPECT_EQ(dog->told("mine"), std::string("\0\n", 2));
    EXPECT_EQ(dog->told("nothing"), std::nullopt);
    EXPECT_FALSE(dog->wait_for({"mine", "nothing"}, milliseconds(0)).value());
  }
  EXPECT_EQ(dogs[2]->local_address(), "127.0.0.1");
}

TEST(Watchdog, WhoWaitsForAWordHearsOfALossInstead) {
  Watch watch(3);
  auto waiting =
      std::async(std::launch::async, [&] { return watch.dogs[1]->wait_for({"of rank 2"}, kLong); });
  watch.dogs[2].reset();
  const auto heard = waiting.get();
  ASSERT_FALSE(heard);
  EXPECT_EQ(heard.error(), kLostRank2);
}

TEST(Watchdog, NamesASilentRank) {
  WatchdogOptions options = options_of(0, 3);
  options.silence = milliseconds(200);
  std::promise<Error> heard;
  const auto dog =
      Watchdog::listen(options, "127.0.0.1", [&](const Error& why) { heard.set_value(why); });
  ASSERT_TRUE(dog);
  const auto begin = std::chrono::steady_clock::now();
  const auto socket = connect_to("127.0.0.1", (*dog)->port(), begin + kLong);
  ASSERT_TRUE(socket);
  const std::string hello("\x0d\0\0\0\0\x2a\0\0\0\0\0\0\0\x01\0\0\0", 17);
  ASSERT_EQ(send(socket->get(), hello.data(), hello.size(), 0), 17);
  const Error why = heard.get_future().get();
  EXPECT_TRUE(why.message.starts_with("rank 1 was lost: nothing was heard of it for "))
      << why.message;
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(200));
}

TEST(Watchdog, DoesNotListenToStrangers) {
  Watch watch(2);
  const auto deadline = std::chrono::steady_clock::now() + kLong;
  const std::vector<std::string> wrong = {
      "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
      std::string("\x0d\0\0\0\0\x2b\0\0\0\0\0\0\0\x01\0\0\0", 17),  // another secret
      std::string("\x0d\0\0\0\0\x2a\0\0\0\0\0\0\0\x01\0\0\0", 17),  // a rank that is there already
      std::string("\x0d\0\0\0\0\x2a\0\0\0\0\0\0\0\x09\0\0\0", 17),  // no rank of the group
      std::string("\x05\0\0\0\x04\x03\0\0\0", 9),                   // a verdict before its hello
      std::string("\xff\xff\xff\xff", 4),
      std::string("\0\0\0\0", 4)};
  for (const std::string& bytes : wrong) {
    const auto socket = connect_to("127.0.0.1", watch.dogs[0]->port(), deadline);
    ASSERT_TRUE(socket);
    make_prompt(*socket);
    ASSERT_EQ(send(socket->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), std::ssize(bytes));
    char byte = 0;
    ssize_t got = -1;
    while (got < 0 && errno != ECONNRESET && std::chrono::steady_clock::now() < deadline) {
      got = recv(socket->get(), &byte, 1, 0);
      errno = got < 0 ? errno : 0;
    }
    EXPECT_LE(got, 0) << "rank 0 answered an unknown process";
  }
  EXPECT_FALSE(watch.dogs[0]->verdict());
  EXPECT_FALSE(watch.dogs[1]->verdict());
}

TEST(Watchdog, NobodyListeningIsALossOfRank0) {
  std::uint16_t port = 0;
  {
    const auto listener = listen_on("127.0.0.1", 0);
    port = local_port(*listener);
  }
  WatchdogOptions options = options_of(1, 2);
  const auto dog = Watchdog::connect(
      options, "127.0.0.1", port, [](const Error&) {}, milliseconds(50));
  ASSERT_FALSE(dog);
  EXPECT_TRUE(dog.error().message.starts_with("rank 0 was lost: no heartbeat connection to"));
}

}  // namespace
}  // namespace dynmo::process
