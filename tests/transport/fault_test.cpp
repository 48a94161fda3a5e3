// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/testing/fault.h"

#include <gtest/gtest.h>

#include <array>
#include <set>

#include "dynmo/core/check.h"
#include "dynmo/transport/in_process.h"
#include "dynmo/transport/tags.h"

namespace dynmo::transport {
namespace {

using namespace std::chrono_literals;
using Bytes4 = std::array<std::byte, 4>;

Bytes4 four(int value) {
  return {std::byte(value), std::byte(value), std::byte(value), std::byte(value)};
}

// Sends 0, 1, ..., count-1 from the faulty rank 0 to rank 1 on `tag`; what arrives.
Expected<std::vector<Bytes4>> exchange(std::vector<Fault> at_sender, std::vector<Fault> at_receiver,
                                       int count, Tag tag = 5) {
  std::vector<Bytes4> arrived(static_cast<std::size_t>(count));
  const auto done = run_ranks(2,
                              [&](Transport& inner) -> Expected<void> {
                                const bool sends = inner.rank() == Member(0);
                                const auto transport =
                                    with_faults(inner, sends ? at_sender : at_receiver);
                                for (int i = 0; i < count; ++i) {
                                  const Bytes4 out = four(i);
                                  auto& in = arrived[static_cast<std::size_t>(i)];
                                  DYNMO_TRY(sends ? transport->send(Member(1), tag, out)->wait()
                                                  : transport->receive(Member(0), tag, in)->wait());
                                }
                                // A barrier, so that a message dropped last is missed as well.
                                const auto mine = four(0);
                                DYNMO_TRY(all_gather(inner, 0, mine));
                                return {};
                              },
                              {.deadline = 200ms});
  if (!done) return done.error();
  return arrived;
}

TEST(Fault, WithoutOnePassesEverythingOn) {
  const auto arrived = exchange({}, {}, 3);
  ASSERT_TRUE(arrived);
  EXPECT_EQ(*arrived, (std::vector<Bytes4>{four(0), four(1), four(2)}));
}

TEST(Fault, CorruptFlipsOneBitOfTheScriptedMessageAtEitherEnd) {
  const Fault send{.kind = Fault::Kind::kCorrupt, .first = 1, .byte = 6};
  const Fault receive{.kind = Fault::Kind::kCorrupt, .on = Fault::On::kReceive, .first = 2};
  const auto arrived = exchange({send}, {receive}, 4);
  ASSERT_TRUE(arrived);
  auto second = four(1);
  second[2] ^= std::byte{1};
  auto third = four(2);
  third[0] ^= std::byte{1};
  EXPECT_EQ(*arrived, (std::vector<Bytes4>{four(0), second, third, four(3)}));
}

TEST(Fault, DropLeavesTheReceiverWaitingUntilItsDeadline) {
  const auto arrived = exchange({{.kind = Fault::Kind::kDrop, .first = 2}}, {}, 3);
  ASSERT_FALSE(arrived);
  EXPECT_EQ(arrived.error().code, ErrorCode::kPeerLost);
  EXPECT_NE(arrived.error().message.find("waited 200 ms"), std::string::npos);
}

TEST(Fault, FailEndsTheGroupWithTheGivenError) {
  const Error why{ErrorCode::kPeerLost, "rank 1 pulled its cable"};
  EXPECT_EQ(exchange({}, {{.on = Fault::On::kReceive, .first = 1, .error = why}}, 3).error(), why);
}

TEST(Fault, DelayHoldsTheMessageBackButKeepsItsContent) {
  const auto start = std::chrono::steady_clock::now();
  const auto arrived = exchange(
      {}, {{.kind = Fault::Kind::kDelay, .on = Fault::On::kReceive, .first = 1, .delay = 60ms}}, 3);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 60ms);
  ASSERT_TRUE(arrived);
  EXPECT_EQ(arrived->back(), four(2));
}

TEST(Fault, CallRunsBeforeTheScriptedMessages) {
  int calls = 0;
  const Fault call{.kind = Fault::Kind::kCall, .first = 1, .count = 2, .call = [&] { ++calls; }};
  EXPECT_TRUE(exchange({call}, {}, 5));
  EXPECT_EQ(calls, 2);
}

TEST(Fault, OnlyMatchingPeersAndTagsCount) {
  const Fault other_peer{.peer = Member(0)};
  const Fault other_tags{.first_tag = 6, .last_tag = 9};
  EXPECT_TRUE(exchange({other_peer, other_tags}, {}, 3));
  const Fault these_tags{.first_tag = 5, .last_tag = 5};
  EXPECT_FALSE(exchange({these_tags}, {}, 3));
}

TEST(Fault, ADroppedReceiveIsRefused) {
  auto group = make_in_process_group(2);
  EXPECT_THROW((void)with_faults(std::move(group[0]),
                                 {{.kind = Fault::Kind::kDrop, .on = Fault::On::kReceive}}),
               CheckFailure);
}

TEST(Tags, OfAllUsesAreApartAndInRange) {
  std::set<Tag> tags;
  std::size_t given = 0;
  const auto add = [&](Tag tag) {
    EXPECT_GE(tag, 0);
    tags.insert(tag);
    ++given;
  };
  for (const int lane : {0, 1, 59}) {
    for (int use = 0; use < static_cast<int>(Control::kCount); ++use) {
      add(control_tag(static_cast<Control>(use), lane));
    }
  }
  for (const int layer : {0, 1, kLayerTags - 1}) {
    add(migration_tag(LayerId(layer)));
    add(reduction_tag(LayerId(layer)));
  }
  for (const int lane : {0, 1, kLanes - 1}) {
    for (const int channel : {0, 1, kChannelTags / 2 - 1}) {
      add(schedule_tag(lane, channel));
      add(second_message_tag(lane, channel));
    }
  }
  EXPECT_EQ(tags.size(), given);
  EXPECT_THROW((void)schedule_tag(0, kChannelTags / 2), CheckFailure);
  EXPECT_THROW((void)control_tag(Control::kDevices, kControlTags), CheckFailure);
}

}  // namespace
}  // namespace dynmo::transport
