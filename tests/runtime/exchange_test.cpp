// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/exchange.h"

#include <gtest/gtest.h>

#include "dynmo/transport/in_process.h"

namespace dynmo::runtime {
namespace {

// Two replicas of two ranks, three layers: every number is (world rank + 1) x its own weight.
TEST(Exchange, TellsAllRanksTheSame) {
  const plan::Plan plan = plan::make_plan({2, 1}, schedule::ScheduleKind::k1F1B);
  const auto figures = [](const Grid& grid) {
    const double number = grid.world().rank().value + 1;
    const bool last = grid.pipeline().rank() == Rank(1);
    OwnFigures own;
    for (const int id : last ? std::vector<int>{2} : std::vector<int>{0, 1}) {
      own.layers[LayerId(id)] = {
          .sample = {.time = {1 * number, 2 * number, 3 * number},
                     .update_s = 4 * number,
                     .stash_bytes = Bytes{static_cast<std::int64_t>(6 * number)}},
          .squared_norm = 5.0 + id};
    }
    if (last) own.losses = {7 * number, 8 * number};
    own.busy_s = 9 * number;
    own.overhead_s = 10 * number;
    own.plan_s = 11 * number;
    own.migrate_s = 12 * number;
    own.beside_s = 13 * number;
    own.actions = 14 * number;
    if (!last) own.message_s = 15 * number;
    return own;
  };
  const auto status = transport::run_ranks(4, [&](transport::Transport& world) -> Expected<void> {
    const Grid grid(world, 2);
    DYNMO_ASSIGN(const Exchange all, exchange(grid, 3, plan, 3, figures(grid)));
    EXPECT_EQ(all.layers.size(), 3U);
    if (all.layers.size() != 3) return {};
    // Ranks 0 and 2 of the group have layers 0 and 1, ranks 1 and 3 layer 2.
    const std::vector<double> means = {2, 2, 3};
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(all.layers[i].time.forward_s, means[i]);
      EXPECT_EQ(all.layers[i].time.input_gradient_s, 2 * means[i]);
      EXPECT_EQ(all.layers[i].time.weight_gradient_s, 3 * means[i]);
      EXPECT_EQ(all.layers[i].update_s, 4 * means[i]);
      EXPECT_EQ(all.layers[i].stash_bytes, Bytes{static_cast<std::int64_t>(6 * means[i])});
    }
    EXPECT_EQ(all.squared_norms, (std::vector<double>{5, 6, 7}));
    // A third micro-batch, of which nothing is known, is 0.
    EXPECT_EQ(all.losses, (std::vector<double>{14, 16, 0, 28, 32, 0}));
    EXPECT_EQ(all.busy_s, (std::vector<double>{9, 18, 27, 36}));
    EXPECT_EQ(all.beside.overhead_s, 10);                       // least
    EXPECT_EQ(all.beside.action_s, 13.0 * 10 / (14 * 10));      // of all actions of all ranks
    EXPECT_EQ(all.beside.message_s, (15.0 * 1 + 15 * 3) / 2);   // of those who measured it
    EXPECT_EQ(all.beside.reduction_bytes_per_s, std::nullopt);  // nobody did
    EXPECT_EQ(all.plan_s, 44);                                  // largest
    EXPECT_EQ(all.migrate_s, 48);
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
}

}  // namespace
}  // namespace dynmo::runtime
