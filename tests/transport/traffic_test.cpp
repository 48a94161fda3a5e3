// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/traffic.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/in_process.h"
#include "dynmo/transport/tags.h"

namespace dynmo::transport {
namespace {

TEST(Traffic, PurposeFollowsFromTheTag) {
  EXPECT_EQ(purpose_of(0), Purpose::kControl);
  EXPECT_EQ(purpose_of(kControlTags - 1), Purpose::kControl);
  for (const LayerId layer : {LayerId(0), LayerId(kLayerTags - 1)}) {
    EXPECT_EQ(purpose_of(migration_tag(layer)), Purpose::kMigration);
    EXPECT_EQ(purpose_of(reduction_tag(layer)), Purpose::kReduction);
  }
  using schedule::ActionKind;
  for (const int lane : {0, 1, 7, kLanes - 1}) {
    for (int stage = 1; stage < 20; ++stage) {
      for (const auto& [kind, purpose] :
           {std::pair{ActionKind::kSendActivation, Purpose::kActivation},
            std::pair{ActionKind::kReceiveActivation, Purpose::kActivation},
            std::pair{ActionKind::kSendGradient, Purpose::kGradient},
            std::pair{ActionKind::kReceiveGradient, Purpose::kGradient}}) {
        const int channel = schedule::channel({kind, StageId(stage), MicroBatchId(0)});
        EXPECT_EQ(purpose_of(schedule_tag(lane, channel)), purpose) << lane << " " << stage;
        EXPECT_EQ(purpose_of(second_message_tag(lane, channel)), purpose) << lane << " " << stage;
      }
    }
  }
}

TEST(Traffic, CountsWhatEachRankSendsAndPassesItOn) {
  const auto done = run_ranks(3, [](Transport& inner) -> Expected<void> {
    CountingTransport transport(inner);
    const int self = transport.rank().value;
    // Rank r sends r + 1 messages of 10 + r bytes to the next, as layer 4 of a migration.
    const Member next((self + 1) % 3);
    const Member before((self + 2) % 3);
    std::vector<std::byte> out(static_cast<std::size_t>(10 + self), std::byte{5});
    std::vector<std::byte> in(static_cast<std::size_t>(10 + before.value));
    std::vector<std::unique_ptr<Operation>> operations;
    for (int i = 0; i <= before.value; ++i) {
      operations.push_back(transport.receive(before, migration_tag(LayerId(4)), in));
    }
    for (int i = 0; i <= self; ++i) {
      operations.push_back(transport.send(next, migration_tag(LayerId(4)), out));
    }
    for (const auto& operation : operations) DYNMO_TRY(operation->wait());
    EXPECT_EQ(in.back(), std::byte{5});
    const std::byte one{};
    DYNMO_TRY(all_gather(transport, control_tag(Control::kUser), std::span(&one, 1)));
    DYNMO_ASSIGN(const TrafficRows all,
                 gather_rows(transport, control_tag(Control::kTraffic), transport.row()));
    std::vector<TrafficRow> expected;
    for (int r = 0; r < 3; ++r) {
      expected.push_back({WorldRank(r),
                          WorldRank((r + 1) % 3),
                          Purpose::kMigration,
                          {r + 1, Bytes{(r + 1) * (10 + r)}}});
      for (int other = 0; other < 3; ++other) {
        if (other == r) continue;
        expected.push_back({WorldRank(r), WorldRank(other), Purpose::kControl, {1, Bytes{1}}});
      }
    }
    EXPECT_EQ(all, sums_of(expected));
    // Two of the control messages are those of the all_gather.
    EXPECT_EQ(transport.sent_bytes().value, (self + 1) * (10 + self) + 2 + 2 * 3 * 5 * 2 * 8);
    return {};
  });
  EXPECT_TRUE(done.has_value()) << done.error().message;
}

// A collective, its closed form: every rank sends every other one what it gives, texts at the
// length of the longest behind a message of their length.
TEST(Traffic, OfRandomCollectivesIsTheirClosedForm) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(mix_key({0xC011EC, seed}));
    const int ranks = 2 + static_cast<int>(rng.below(4));
    const auto kind = rng.below(3);
    std::vector<std::size_t> sizes;
    for (int r = 0; r < ranks; ++r) {
      sizes.push_back(rng.below(4) == 0 ? 0 : static_cast<std::size_t>(rng.below(3000)));
    }
    const auto longest = static_cast<std::int64_t>(*std::ranges::max_element(sizes));
    MessageCount expected;
    const auto expect_message = [&](std::int64_t bytes) {
      if (bytes == 0) return;
      ++expected.messages;
      expected.bytes += Bytes{bytes};
    };
    if (kind == 0) expect_message(8);
    if (kind < 2) expect_message(longest);
    if (kind == 2) expect_message(8 * longest);
    const auto done = run_ranks(ranks, [&](Transport& inner) -> Expected<void> {
      CountingTransport transport(inner);
      const Tag tag = control_tag(Control::kUser);
      if (kind == 0) {
        DYNMO_TRY(gather_texts(transport, tag, std::string(sizes[inner.rank().index()], 'x')));
      } else if (kind == 1) {
        const std::vector<std::byte> mine(static_cast<std::size_t>(longest), std::byte{7});
        DYNMO_TRY(all_gather(transport, tag, mine));
      } else {
        const std::vector<double> mine(static_cast<std::size_t>(longest), 0.5);
        DYNMO_TRY(gather_numbers(transport, tag, mine));
      }
      for (int to = 0; to < ranks; ++to) {
        const bool other = to != inner.rank().value;
        EXPECT_EQ(transport.sent(Member(to), Purpose::kControl), other ? expected : MessageCount{})
            << "seed " << seed << ", rank " << inner.rank().value << " to " << to;
      }
      EXPECT_EQ(transport.sent_bytes(), expected.bytes * (ranks - 1)) << "seed " << seed;
      return {};
    });
    ASSERT_TRUE(done.has_value()) << "seed " << seed << ": " << done.error().message;
  }
}

}  // namespace
}  // namespace dynmo::transport
