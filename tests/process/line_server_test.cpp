// SPDX-License-Identifier: Apache-2.0
// Clients on threads of this process. Times bound hangs; none decides what a test finds.
#include "dynmo/process/line_server.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <condition_variable>
#include <filesystem>
#include <future>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace dynmo::process {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kHang{60000};
constexpr std::size_t kMaxLine = 100;

// Holds the calls of the server's thread for the test's.
class Heard {
 public:
  void add(ClientId client, std::string_view line) {
    const std::lock_guard lock(mutex_);
    lines_.emplace_back(client, line);
    changed_.notify_all();
  }
  void gone(ClientId client) {
    const std::lock_guard lock(mutex_);
    gone_.push_back(client);
    changed_.notify_all();
  }
  // The first client that said `line`; 0: none does.
  ClientId who_said(std::string_view line) {
    std::unique_lock lock(mutex_);
    ClientId found = 0;
    changed_.wait_for(lock, kHang, [&] {
      for (const auto& [client, text] : lines_) {
        if (text == line) found = client;
      }
      return found != 0;
    });
    return found;
  }
  bool is_gone(ClientId client) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kHang, [&] { return std::ranges::count(gone_, client) > 0; });
  }
  std::vector<ClientId> all_gone() {
    const std::lock_guard lock(mutex_);
    return gone_;
  }
  std::size_t lines() {
    const std::lock_guard lock(mutex_);
    return lines_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<ClientId, std::string>> lines_;
  std::vector<ClientId> gone_;
};

// Says a line back at once; to "wait..." nothing until the test sends something.
std::unique_ptr<LineServer> serve(Heard& heard, LineServer::Options options = {}) {
  options.max_line = kMaxLine;
  auto server = LineServer::listen(
      options,
      [&heard](ClientId client, std::string_view line) {
        heard.add(client, line);
        if (line.starts_with("wait")) return LineServer::Answer{.line = "", .done = false};
        return LineServer::Answer{.line = "you said " + std::string(line) + "\n", .done = true};
      },
      [&heard](ClientId client) { heard.gone(client); });
  EXPECT_TRUE(server) << server.error().message;
  return *std::move(server);
}

LineClient connect(const LineServer& server) {
  auto client = LineClient::connect("127.0.0.1", server.port(), kHang);
  EXPECT_TRUE(client) << client.error().message;
  return *std::move(client);
}

std::string hear(LineClient& client) {
  const auto line = client.receive(kMaxLine, kHang);
  return line ? *line : "error: " + line.error().message;
}

// The server has closed the connection, whatever it says of it.
bool is_closed(LineClient& client) {
  while (true) {
    const auto line = client.receive(kMaxLine, kHang);
    if (!line) return line.error().message.find("said nothing") == std::string::npos;
  }
}

// Bytes until the connection ends.
std::size_t rest_of(const LineClient& client) {
  std::vector<char> bytes(1 << 16);
  std::size_t sum = 0;
  while (true) {
    pollfd wait{.fd = client.socket().get(), .events = POLLIN, .revents = 0};
    if (poll(&wait, 1, static_cast<int>(kHang.count())) != 1) return sum;
    const ssize_t got = recv(client.socket().get(), bytes.data(), bytes.size(), 0);
    if (got <= 0) return sum;
    sum += static_cast<std::size_t>(got);
  }
}

bool answers(const LineServer& server) {
  LineClient client = connect(server);
  return client.send("hello\n") && hear(client) == "you said hello";
}

TEST(LineServer, AnswersALineAndCloses) {
  Heard heard;
  const auto server = serve(heard);
  LineClient client = connect(*server);
  ASSERT_TRUE(client.send("a"));  // in pieces
  ASSERT_TRUE(client.send("bc"));
  ASSERT_TRUE(client.send("\nmore that nobody reads\n"));
  EXPECT_EQ(hear(client), "you said abc");
  EXPECT_TRUE(is_closed(client));
  EXPECT_TRUE(heard.all_gone().empty()) << "it was done";
}

TEST(LineServer, AClientThatWaitsHearsMoreLinesLater) {
  Heard heard;
  const auto server = serve(heard);
  LineClient client = connect(*server);
  ASSERT_TRUE(client.send("wait\n"));
  const ClientId id = heard.who_said("wait");
  ASSERT_NE(id, 0U);
  server->send(id, "first\n", /*done=*/false);
  EXPECT_EQ(hear(client), "first");
  server->send(id, "second\nthird\n", /*done=*/true);
  server->send(id, "never\n", /*done=*/true);
  EXPECT_EQ(hear(client), "second");
  EXPECT_EQ(hear(client), "third");
  EXPECT_TRUE(is_closed(client));
  server->send(id, "to nobody\n", /*done=*/true);
  EXPECT_TRUE(answers(*server));
}

TEST(LineServer, TellsOfAClientThatGoesWhileItWaits) {
  Heard heard;
  const auto server = serve(heard);
  ClientId id = 0;
  {
    LineClient client = connect(*server);
    ASSERT_TRUE(client.send("wait\n"));
    id = heard.who_said("wait");
  }
  EXPECT_TRUE(heard.is_gone(id));
  {
    const LineClient silent = connect(*server);  // has said nothing, so nobody misses it
  }
  EXPECT_TRUE(answers(*server));
  EXPECT_EQ(heard.all_gone().size(), 1U);
}

TEST(LineServer, ManyClientsAtOnceHearTheirOwn) {
  Heard heard;
  const auto server = serve(heard);
  constexpr int kClients = 16;
  constexpr int kRounds = 10;
  std::vector<int> good(kClients);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kClients; ++i) {
      threads.emplace_back([&, i] {
        for (int round = 0; round < kRounds; ++round) {
          auto client = LineClient::connect("127.0.0.1", server->port(), kHang);
          const std::string line = std::to_string(i) + "." + std::to_string(round);
          const bool waits = round % 2 == 1;
          if (!client || !client->send((waits ? "wait " : "") + line + "\n")) return;
          if (waits) server->send(heard.who_said("wait " + line), "you said " + line + "\n", true);
          if (hear(*client) == "you said " + line) ++good[static_cast<std::size_t>(i)];
        }
      });
    }
  }
  EXPECT_EQ(good, std::vector(kClients, kRounds));
}

TEST(LineServer, ALineThatIsTooLongIsNotReadToItsEnd) {
  Heard heard;
  const auto server = serve(heard);
  const std::string full(kMaxLine, 'x');
  LineClient just_so = connect(*server);
  ASSERT_TRUE(just_so.send(full + "\n"));
  EXPECT_EQ(hear(just_so).size(), kMaxLine + std::string("you said ").size());
  for (const std::string& end : {std::string("\n"), std::string(1 << 20, 'y')}) {
    LineClient client = connect(*server);
    // The rest may find the connection closed.
    static_cast<void>(client.send(fmt::format("{}x{}", full, end)));
    EXPECT_TRUE(is_closed(client));
  }
  EXPECT_EQ(heard.lines(), 1U);
  EXPECT_TRUE(answers(*server));
}

TEST(LineServer, AClientThatSaysNothingIsDropped) {
  Heard heard;
  const auto server = serve(heard, {.first_line = milliseconds(1)});
  LineClient silent = connect(*server);
  LineClient half = connect(*server);
  ASSERT_TRUE(half.send("half a li"));
  EXPECT_TRUE(is_closed(silent));
  EXPECT_TRUE(is_closed(half));
  EXPECT_TRUE(heard.all_gone().empty());
}

// The limit is for the first line alone: a process may wait for days.
TEST(LineServer, AClientThatWaitsIsNotDropped) {
  Heard heard;
  const auto server = serve(heard, {.first_line = milliseconds(1)});
  LineClient waiting = connect(*server);
  ASSERT_TRUE(waiting.send("wait\n"));
  const ClientId id = heard.who_said("wait");
  if (id == 0) GTEST_SKIP() << "the machine was too slow for its line";
  LineClient silent = connect(*server);
  EXPECT_TRUE(
      is_closed(silent));  // by the same look at the clock that could have dropped the first
  server->send(id, "still here\n", /*done=*/true);
  EXPECT_EQ(hear(waiting), "still here");
}

TEST(LineServer, AClientThatDoesNotReadDisturbsNobody) {
  Heard heard;
  const std::size_t held = std::size_t{64} << 20;
  const auto server = serve(heard, {.max_unread = held, .first_line = milliseconds(1)});
  LineClient waits = connect(*server);
  ASSERT_TRUE(waits.send("wait 1\n"));
  LineClient done = connect(*server);
  const int little = 1 << 18;  // that the system holds for it
  setsockopt(done.socket().get(), SOL_SOCKET, SO_RCVBUF, &little, sizeof little);
  ASSERT_TRUE(done.send("wait 2\n"));
  const ClientId first = heard.who_said("wait 1");
  const ClientId second = heard.who_said("wait 2");
  if (first == 0 || second == 0) GTEST_SKIP() << "the machine was too slow for their lines";
  // More than the system holds for a reader, and more than the server does.
  const std::string much = std::string(2 * held, 'x') + "\n";
  server->send(first, much, /*done=*/false);
  EXPECT_TRUE(heard.is_gone(first));
  // Less than the server holds, for one that is done: its place is free again after a while.
  const std::size_t some = held / 2;
  server->send(second, std::string(some, 'x'), /*done=*/true);
  LineClient silent = connect(*server);
  EXPECT_TRUE(is_closed(silent));  // the same look at the clock finds both
  EXPECT_LT(rest_of(done), some);
}

TEST(LineServer, AClientThatNeverStopsTalkingDisturbsNobody) {
  Heard heard;
  const auto server = serve(heard);
  LineClient talks = connect(*server);
  ASSERT_TRUE(talks.send("wait\n"));
  ASSERT_NE(heard.who_said("wait"), 0U);
  {
    std::jthread talking([&](const std::stop_token& stop) {
      const std::string more(1 << 16, 'x');
      while (!stop.stop_requested() && talks.send(more)) {
      }
    });
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(answers(*server));
  }
  server->send(heard.who_said("wait"), "enough\n", /*done=*/true);
  EXPECT_EQ(hear(talks), "enough");
}

TEST(LineServer, ThoseThatWaitForAnAnswerKeepNobodyOut) {
  Heard heard;
  const auto server = serve(heard, {.max_clients = 2});
  std::vector<LineClient> waiting;
  for (int i = 0; i < 100; ++i) {
    waiting.push_back(connect(*server));
    ASSERT_TRUE(waiting.back().send("wait " + std::to_string(i) + "\n"));
    ASSERT_NE(heard.who_said("wait " + std::to_string(i)), 0U);
  }
  EXPECT_TRUE(answers(*server));
  waiting.pop_back();
  EXPECT_TRUE(heard.is_gone(heard.who_said("wait 99")));
  server->send(heard.who_said("wait 0"), "over\n", /*done=*/true);
  EXPECT_EQ(hear(waiting.front()), "over");
}

TEST(LineServer, ThoseThatSaidNothingMakeRoomInTheirOrder) {
  Heard heard;
  const auto server = serve(heard, {.max_clients = 2});
  LineClient waits = connect(*server);
  ASSERT_TRUE(waits.send("wait\n"));
  ASSERT_NE(heard.who_said("wait"), 0U);
  LineClient first = connect(*server);
  LineClient second = connect(*server);
  EXPECT_TRUE(answers(*server));
  EXPECT_TRUE(is_closed(first));
  ASSERT_TRUE(second.send("late\n"));
  EXPECT_EQ(hear(second), "you said late");
  server->send(heard.who_said("wait"), "over\n", /*done=*/true);
  EXPECT_EQ(hear(waits), "over");
  EXPECT_TRUE(heard.all_gone().empty());
}

TEST(LineServer, ManyThatSayNothingKeepNobodyOut) {
  Heard heard;
  const auto server = serve(heard, {.max_clients = 4});
  std::vector<LineClient> silent;
  for (int i = 0; i < 100; ++i) {
    silent.push_back(connect(*server));
    if (i % 10 == 9) {
      EXPECT_TRUE(answers(*server)) << "after " << i;
    }
  }
  EXPECT_EQ(heard.lines(), 10U);
}

TEST(LineServer, WhatWasSentBeforeItEndsArrives) {
  Heard heard;
  auto server = serve(heard);
  LineClient client = connect(*server);
  ASSERT_TRUE(client.send("wait\n"));
  server->send(heard.who_said("wait"), "the run has ended\n", /*done=*/true);
  server->flush();
  server.reset();
  EXPECT_EQ(hear(client), "the run has ended");
  EXPECT_TRUE(is_closed(client));
}

// Though the server's thread is past taking what is to be sent in the turn in which it is to end.
TEST(LineServer, WhatWasSentBeforeItIsDestroyedArrives) {
  std::promise<void> entered;
  std::promise<void> ending;
  std::promise<ClientId> waiting;
  auto server = LineServer::listen(
      {},
      [&](ClientId id, std::string_view line) -> LineServer::Answer {
        if (line == "wait") {
          waiting.set_value(id);
          return {.line = "", .done = false};
        }
        entered.set_value();
        ending.get_future().wait();
        return {.line = "done\n", .done = true};
      },
      [](ClientId) {});
  ASSERT_TRUE(server);
  LineClient waits = connect(**server);
  ASSERT_TRUE(waits.send("wait\n"));
  const ClientId id = waiting.get_future().get();
  LineClient holds = connect(**server);
  ASSERT_TRUE(holds.send("hold\n"));
  entered.get_future().wait();
  (*server)->send(id, "over\n", /*done=*/true);
  std::jthread destroyer([&] { server->reset(); });
  // If it has not begun by then, nothing is shown, and nothing fails.
  std::this_thread::sleep_for(milliseconds(50));
  ending.set_value();
  EXPECT_EQ(hear(waits), "over");
}

TEST(LineServer, TwoHundredClientsLeaveNothingOpen) {
  Heard heard;
  const auto server = serve(heard);
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  // The server may close its end of the newest a moment after the client has gone.
  const auto fewest = [&] {
    auto found = descriptors();
    for (int i = 0; i < 200; ++i) {
      std::this_thread::sleep_for(milliseconds(1));
      found = std::min(found, descriptors());
    }
    return found;
  };
  ASSERT_TRUE(answers(*server));
  const auto before = fewest();
  for (int i = 0; i < 200; ++i) {
    LineClient client = connect(*server);
    if (i % 4 == 0) continue;  // gone at once
    ASSERT_TRUE(client.send(i % 4 == 1 ? "hello\n" : i % 4 == 2 ? "wait\n" : "half"));
    EXPECT_TRUE(i % 4 != 1 || hear(client) == "you said hello");
  }
  ASSERT_TRUE(answers(*server));
  EXPECT_EQ(fewest(), before);
}

TEST(LineClient, SaysWhyItHearsNothing) {
  Heard heard;
  auto server = serve(heard);
  LineClient client = connect(*server);
  ASSERT_TRUE(client.send("wait\n"));
  const ClientId id = heard.who_said("wait");
  const auto nothing = client.receive(kMaxLine, milliseconds(1));
  ASSERT_FALSE(nothing);
  EXPECT_EQ(nothing.error().code, ErrorCode::kPeerLost);
  EXPECT_EQ(nothing.error().message, "it said nothing for 1 ms");
  server->send(id, std::string(9000, 'x'), /*done=*/false);
  const auto endless = client.receive(kMaxLine, kHang);
  ASSERT_FALSE(endless);
  EXPECT_NE(endless.error().message.find("without an end"), std::string::npos);
  const std::uint16_t port = server->port();
  server.reset();
  const auto nobody = LineClient::connect("127.0.0.1", port, milliseconds(1));
  ASSERT_FALSE(nobody);
  EXPECT_EQ(nobody.error().code, ErrorCode::kPeerLost);
}

}  // namespace
}  // namespace dynmo::process
