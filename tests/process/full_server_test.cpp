// SPDX-License-Identifier: Apache-2.0
// A server of lines in a process without a free descriptor.
#include <gtest/gtest.h>

#include <string>

#include "dynmo/process/line_server.h"
#include "tests/support/few_descriptors.h"

namespace dynmo::process {
namespace {

using dynmo::testing::Calls;
using std::chrono::milliseconds;

constexpr milliseconds kLongTime{60000};

void serve_without_descriptors() {
  const auto server = LineServer::listen(
      {},
      [](ClientId, std::string_view line) {
        return LineServer::Answer{.line = "you said " + std::string(line) + "\n",
                                  .done = line != "wait"};
      },
      [](ClientId) {});
  ASSERT_TRUE(server);
  const auto hear = [](LineClient& client) {
    const auto line = client.receive(100, kLongTime);
    return line ? *line : line.error().message;
  };
  auto old = LineClient::connect("127.0.0.1", (*server)->port(), kLongTime);
  ASSERT_TRUE(old && old->send("wait\n"));
  EXPECT_EQ(hear(*old), "you said wait");
  UniqueFd last(::dup(STDERR_FILENO));
  Expected<LineClient> late = LineClient();
  {
    const NoFreeDescriptor none;
    EXPECT_FALSE((*server)->take_failure());
    last.reset();  // for the client
    late = LineClient::connect("127.0.0.1", (*server)->port(), kLongTime);
    ASSERT_TRUE(late && late->send("hello\n"));
    ASSERT_TRUE(dynmo::testing::wait_for_failed_accepts(1));
    const Calls busy;
    for (int i = 0; i < 200; ++i) {
      (*server)->send(1, "more\n", /*done=*/false);
      EXPECT_EQ(hear(*old), "more");
    }
    EXPECT_LE(busy.accepts(), busy.most(milliseconds(50)));
    const Calls idle;
    ASSERT_TRUE(dynmo::testing::wait_for_failed_accepts(dynmo::testing::calls.failed_accepts + 2));
    EXPECT_LE(idle.polls(), idle.most(milliseconds(10)));
    const auto failure = (*server)->take_failure();
    ASSERT_TRUE(failure);
    EXPECT_EQ(*failure,
              "new connections wait: Too many open files; close some, or raise the limit of "
              "open files (ulimit -n)");
    EXPECT_FALSE((*server)->take_failure()) << "it is said once";
  }
  EXPECT_EQ(hear(*late), "you said hello");
  auto next = LineClient::connect("127.0.0.1", (*server)->port(), kLongTime);
  ASSERT_TRUE(next && next->send("hello\n"));
  EXPECT_EQ(hear(*next), "you said hello");
}

void listen_with_one_descriptor() {
  UniqueFd last(::dup(STDERR_FILENO));
  const NoFreeDescriptor none;
  last.reset();
  const auto server = LineServer::listen({}, {}, {});
  ASSERT_FALSE(server);
  EXPECT_EQ(server.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(server.error().message, "cannot listen on port 0 of 127.0.0.1: Too many open files");
}

TEST(FullServer, NeedsTwoDescriptors) {
  EXPECT_TRUE(dynmo::testing::passes_in_own_process(listen_with_one_descriptor));
}

TEST(FullServer, WaitsWithoutSpinningAndServesItsClients) {
  EXPECT_TRUE(dynmo::testing::passes_in_own_process(serve_without_descriptors));
}

}  // namespace
}  // namespace dynmo::process
