// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/traffic.h"

#include <gtest/gtest.h>

#include "dynmo/core/check.h"
#include "dynmo/schedule/lowering.h"
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
    DYNMO_ASSIGN(const Traffic all,
                 gather_traffic(transport, control_tag(Control::kTraffic), transport.sent()));
    Traffic expected(3);
    for (int r = 0; r < 3; ++r) {
      expected.at(WorldRank(r), WorldRank((r + 1) % 3), Purpose::kMigration) = {
          r + 1, Bytes{(r + 1) * (10 + r)}};
      for (int other = 0; other < 3; ++other) {
        if (other != r)
          expected.at(WorldRank(r), WorldRank(other), Purpose::kControl) = {1, Bytes{1}};
      }
    }
    EXPECT_EQ(all, expected);
    // Two of the control messages are those of the all_gather.
    EXPECT_EQ(transport.sent_bytes().value, (self + 1) * (10 + self) + 2 + 2 * 3 * 5 * 2 * 8);
    return {};
  });
  EXPECT_TRUE(done.has_value()) << done.error().message;
}

}  // namespace
}  // namespace dynmo::transport
