// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/in_process.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"

namespace dynmo::transport {
namespace {

using namespace std::chrono_literals;

std::span<const std::byte> bytes_of(const int& value) {
  return std::as_bytes(std::span(&value, 1));
}
std::span<std::byte> bytes_of(int& value) { return std::as_writable_bytes(std::span(&value, 1)); }

TEST(InProcess, ASendCompletesOnlyWhenItsReceiveIsPosted) {
  auto group = make_in_process_group(2, {.deadline = 50ms});
  const int out = 7;
  const auto send = group[0]->send(Member(1), 3, bytes_of(out));
  const auto done = send->wait();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kPeerLost);
  EXPECT_EQ(done.error().message,
            "rank 0 waited 50 ms for rank 1: message of 4 bytes from rank 0 to rank 1 with tag 3");
}

TEST(InProcess, EitherEndMayComeFirst) {
  auto group = make_in_process_group(2);
  const int out = 7;
  int in = 0;
  const auto send = group[0]->send(Member(1), 0, bytes_of(out));
  const auto receive = group[1]->receive(Member(0), 0, bytes_of(in));
  EXPECT_TRUE(send->wait());
  EXPECT_TRUE(receive->wait());
  EXPECT_EQ(in, 7);
  const auto late = group[0]->receive(Member(1), 0, bytes_of(in));
  const int back = 8;
  EXPECT_TRUE(group[1]->send(Member(0), 0, bytes_of(back))->wait());
  EXPECT_TRUE(late->wait());
  EXPECT_EQ(in, 8);
}

TEST(InProcess, MessagesOfOneTagKeepTheirOrderAndTagsAreApart) {
  auto group = make_in_process_group(2);
  const std::vector<int> out = {1, 2, 3, 4};
  std::vector<int> in(4);
  std::vector<std::unique_ptr<Operation>> operations;
  // Tag 9 is sent last and received first; tag 5 carries 1, 2, 3.
  for (int i = 0; i < 4; ++i) {
    operations.push_back(group[0]->send(Member(1), i < 3 ? 5 : 9, bytes_of(out[std::size_t(i)])));
  }
  operations.push_back(group[1]->receive(Member(0), 9, bytes_of(in[3])));
  for (std::size_t i = 0; i < 3; ++i) {
    operations.push_back(group[1]->receive(Member(0), 5, bytes_of(in[i])));
  }
  for (const auto& operation : operations) EXPECT_TRUE(operation->wait());
  EXPECT_EQ(in, out);
}

TEST(InProcess, DifferentSizesFailTheGroupAndNameBoth) {
  auto group = make_in_process_group(3);
  const int out = 7;
  std::array<std::byte, 6> in{};
  int third = 0;
  const auto bystander = group[2]->receive(Member(0), 0, bytes_of(third));
  const auto send = group[0]->send(Member(1), 2, bytes_of(out));
  const auto receive = group[1]->receive(Member(0), 2, in);
  const Error expected{ErrorCode::kInternal,
                       "message of 4 bytes from rank 0 to rank 1 with tag 2 meets a receive of 6 "
                       "bytes: both ends must name the same number"};
  EXPECT_EQ(send->wait().error(), expected);
  EXPECT_EQ(receive->wait().error(), expected);
  EXPECT_EQ(bystander->wait().error(), expected);
  EXPECT_EQ(group[2]->send(Member(0), 0, bytes_of(out))->wait().error(), expected);
}

TEST(InProcess, AbortFreesAllWaitersAtOnceAndTheFirstErrorStays) {
  constexpr int kRanks = 6;
  auto group = make_in_process_group(kRanks, {.deadline = 60s});
  const Error why{ErrorCode::kInterrupted, "the user said stop"};
  std::atomic<int> freed = 0;
  std::atomic<int> posted = 0;
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        int in = 0;
        Transport& mine = *group[static_cast<std::size_t>(rank)];
        const auto receive = mine.receive(Member((rank + 1) % kRanks), 1, bytes_of(in));
        ++posted;
        if (const auto done = receive->wait(); !done && done.error() == why) ++freed;
      });
    }
    while (posted < kRanks) std::this_thread::yield();
    group[0]->abort(why);
    group[1]->abort({ErrorCode::kPeerLost, "too late"});
  }
  EXPECT_EQ(freed, kRanks);
  int in = 0;
  EXPECT_EQ(group[2]->receive(Member(3), 1, bytes_of(in))->wait().error(), why);
}

TEST(InProcess, ARankThatLeavesIsLostToThoseWhoWaitForIt) {
  auto group = make_in_process_group(2, {.deadline = 60s});
  int in = 0;
  const auto receive = group[0]->receive(Member(1), 4, bytes_of(in));
  group[1].reset();
  EXPECT_EQ(receive->wait().error().message,
            "rank 1 has left the group: message of 4 bytes from rank 1 to rank 0 with tag 4 "
            "cannot pass");
}

TEST(InProcess, ARankMayLeaveWhenNobodyNeedsItAnyMore) {
  auto group = make_in_process_group(3);
  group[2].reset();
  int in = 0;
  const int out = 5;
  const auto receive = group[0]->receive(Member(1), 0, bytes_of(in));
  EXPECT_TRUE(group[1]->send(Member(0), 0, bytes_of(out))->wait());
  EXPECT_TRUE(receive->wait());
  const auto lost = group[0]->send(Member(2), 0, bytes_of(out))->wait();
  EXPECT_EQ(lost.error().code, ErrorCode::kPeerLost);
}

TEST(InProcess, DroppingAnOperationFailsTheGroupRatherThanLeavingAWildPointer) {
  auto group = make_in_process_group(2);
  const int out = 1;
  {
    int in = 0;
    (void)group[1]->receive(Member(0), 0, bytes_of(in));
  }
  EXPECT_EQ(group[0]->send(Member(1), 0, bytes_of(out))->wait().error().message,
            "rank 1 dropped an operation that it had not waited for: message of 4 bytes from rank "
            "0 to rank 1 with tag 0");
}

TEST(InProcess, WrongPeersTagsAndEmptyMessagesAreBugs) {
  auto group = make_in_process_group(2);
  int in = 0;
  EXPECT_THROW((void)group[0]->receive(Member(0), 0, bytes_of(in)), CheckFailure);
  EXPECT_THROW((void)group[0]->receive(Member(2), 0, bytes_of(in)), CheckFailure);
  EXPECT_THROW((void)group[0]->receive(Member(1), -1, bytes_of(in)), CheckFailure);
  EXPECT_THROW((void)group[0]->receive(Member(1), 0, {}), CheckFailure);
}

TEST(RunRanks, ReturnsTheFirstErrorAndEndsTheOthers) {
  const auto done = run_ranks(4, [](Transport& transport) -> Expected<void> {
    if (transport.rank() == Member(2)) return make_error(ErrorCode::kInfeasible, "rank 2 gives up");
    int in = 0;
    return transport.receive(Member(2), 0, bytes_of(in))->wait();
  });
  EXPECT_EQ(done.error(), (Error{ErrorCode::kInfeasible, "rank 2 gives up"}));
}

TEST(RunRanks, RethrowsTheFirstExceptionAfterAllHaveEnded) {
  std::atomic<int> ended = 0;
  EXPECT_THROW((void)run_ranks(3,
                               [&](Transport& transport) -> Expected<void> {
                                 if (transport.rank() == Member(1)) throw std::out_of_range("here");
                                 int in = 0;
                                 auto done = transport.receive(Member(1), 0, bytes_of(in))->wait();
                                 ++ended;
                                 return done;
                               }),
               std::out_of_range);
  EXPECT_EQ(ended, 2);
}

TEST(AllGather, GivesEveryRankWhatEachGave) {
  for (const int size : {1, 2, 3, 8}) {
    const auto done = run_ranks(size, [&](Transport& transport) -> Expected<void> {
      for (int round = 0; round < 20; ++round) {
        const std::array<int, 2> mine = {transport.rank().value, round};
        DYNMO_ASSIGN(const auto all, all_gather(transport, 1, std::as_bytes(std::span(mine))));
        for (int rank = 0; rank < size; ++rank) {
          std::array<int, 2> theirs{};
          std::memcpy(theirs.data(), all.at(static_cast<std::size_t>(rank)).data(), sizeof theirs);
          EXPECT_EQ(theirs, (std::array<int, 2>{rank, round}));
        }
      }
      return {};
    });
    EXPECT_TRUE(done) << done.error().message;
  }
}

TEST(AllGather, OfNothingIsNothingAndOfDifferentSizesIsAnError) {
  auto group = make_in_process_group(1);
  EXPECT_EQ(all_gather(*group[0], 0, {})->size(), 1U);
  const auto done = run_ranks(3, [](Transport& transport) -> Expected<void> {
    const std::vector<std::byte> mine(transport.rank() == Member(1) ? 3 : 2);
    DYNMO_TRY(all_gather(transport, 0, mine));
    return {};
  });
  EXPECT_EQ(done.error().code, ErrorCode::kInternal);
}

// Every rank sends every other a few thousand messages of seeded sizes on a few tags, with a
// bounded number in flight, and checks content and order.
TEST(InProcess, EightRanksExchangeThousandsOfMessages) {
  constexpr int kRanks = 8;
  constexpr int kMessages = 400;  // a pair of ranks and direction: 22,400 in all
  constexpr Tag kTags = 3;
  const auto content = [](int from, int to, int number) {
    Rng rng(mix_key({11, std::uint64_t(from), std::uint64_t(to), std::uint64_t(number)}));
    std::vector<std::byte> bytes(1 + rng.below(300));
    for (auto& byte : bytes) byte = static_cast<std::byte>(rng.below(256));
    return bytes;
  };
  const auto done = run_ranks(kRanks, [&](Transport& transport) -> Expected<void> {
    const int self = transport.rank().value;
    for (int number = 0; number < kMessages; ++number) {
      std::vector<std::vector<std::byte>> in(kRanks);
      std::vector<std::vector<std::byte>> out(kRanks);
      std::vector<std::unique_ptr<Operation>> operations;
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer == self) continue;
        const auto p = static_cast<std::size_t>(peer);
        out[p] = content(self, peer, number);
        in[p].resize(content(peer, self, number).size());
        operations.push_back(transport.receive(Member(peer), number % kTags, in[p]));
        operations.push_back(transport.send(Member(peer), number % kTags, out[p]));
      }
      for (const auto& operation : operations) DYNMO_TRY(operation->wait());
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer == self) continue;
        EXPECT_EQ(in[static_cast<std::size_t>(peer)], content(peer, self, number));
      }
    }
    return {};
  });
  EXPECT_TRUE(done) << done.error().message;
}

// Abort at a random moment of heavy traffic: nobody hangs, nobody writes to freed bytes (asan,
// tsan).
TEST(InProcess, AbortInTheMiddleOfTrafficEndsEveryRank) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::atomic<int> failed = 0;
    const Error why{ErrorCode::kPeerLost, "pulled"};
    const auto done = run_ranks(4, [&](Transport& transport) -> Expected<void> {
      Rng rng(mix_key({seed, std::uint64_t(transport.rank().value)}));
      const auto last = 20 + rng.below(200);
      for (std::uint64_t round = 0;; ++round) {
        if (transport.rank() == Member(3) && round == last) transport.abort(why);
        const std::vector<std::byte> mine(4096);
        const auto all = all_gather(transport, 0, mine);
        if (!all) {
          EXPECT_EQ(all.error(), why) << "seed " << seed;
          ++failed;
          return all.error();
        }
      }
    });
    EXPECT_EQ(done.error(), why);
    EXPECT_EQ(failed, 4) << "seed " << seed;
  }
}

}  // namespace
}  // namespace dynmo::transport
