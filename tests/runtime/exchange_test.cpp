// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/exchange.h"

#include <gtest/gtest.h>

#include "dynmo/model/autograd_layer.h"
#include "dynmo/transport/in_process.h"

namespace dynmo::runtime {
namespace {

// Two figures; with a loss or without one.
std::shared_ptr<const model::Layer> counting_layer(bool loss) {
  return model::autograd_layer(
      "counting", {}, model::HiddenFunction(),
      {.buffers = {}, .figures = {"rows", "tokens"}, .needs = {.targets = false, .loss = loss}});
}

// Two replicas of two ranks, three layers: every number is (world rank + 1) x its own weight.
// Layers 1 and 2 have a loss.
TEST(Exchange, TellsAllRanksTheSame) {
  const plan::Plan plan = plan::make_plan({2, 1}, schedule::ScheduleKind::k1F1B);
  const model::Model layers = {counting_layer(false), counting_layer(true), counting_layer(true)};
  const auto figures = [](const transport::Grid& grid) {
    const double number = grid.rank().value + 1;
    const bool last = grid.position() == Rank(1);
    RankStats own;
    for (const int id : last ? std::vector<int>{2} : std::vector<int>{0, 1}) {
      own.layers[LayerId(id)] = {
          .sample = {.time = {1 * number, 2 * number, 3 * number},
                     .update_s = 4 * number,
                     .stash_bytes = Bytes{static_cast<std::int64_t>(6 * number)}},
          .squared_norm = 5.0 + id,
          .figures = {16 * number, 17.0 + id}};
    }
    if (last) own.layers[LayerId(2)].losses = {7 * number, 8 * number};
    if (!last) own.layers[LayerId(1)].losses = {0.25 * number, 0, 0.5 * number};
    own.figures.busy_s = 9 * number;
    own.figures.overhead_s = 10 * number;
    own.figures.plan_s = 11 * number;
    own.figures.migrate_s = 12 * number;
    own.figures.action_overhead_s = 13 * number;
    own.figures.actions = 14 * number;
    if (!last) own.figures.message_s = 15 * number;
    if (number > 2) own.refuses = number;  // ranks 2 and 3
    return own;
  };
  const auto status = transport::run_ranks(4, [&](transport::Transport& world) -> Expected<void> {
    const transport::Grid grid(world, 2);
    DYNMO_ASSIGN(const Exchange all, exchange(grid, 3, plan, layers, 3, figures(grid)));
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
    // Sums over both replicas.
    EXPECT_EQ(all.figures, (std::vector<std::vector<double>>{{64, 34}, {64, 36}, {96, 38}}));
    // The losses of layers 1 and 2; a third micro-batch, of which layer 2 says nothing, is 0 there.
    EXPECT_EQ(all.losses, (std::vector<double>{14.25, 16, 0.5, 28.75, 32, 1.5}));
    EXPECT_EQ(all.busy_s, (std::vector<double>{9, 18, 27, 36}));
    EXPECT_EQ(all.stats.overhead.overhead_s, 10);                   // least
    EXPECT_EQ(all.stats.overhead.action_s, 13.0 * 10 / (14 * 10));  // of all actions of all ranks
    EXPECT_EQ(all.stats.overhead.message_s, (15.0 * 1 + 15 * 3) / 2);   // of those who measured it
    EXPECT_EQ(all.stats.overhead.reduction_bytes_per_s, std::nullopt);  // nobody did
    EXPECT_EQ(all.stats.plan_s, 44);                                    // largest
    EXPECT_EQ(all.stats.migrate_s, 48);
    EXPECT_EQ(all.refused, 3);  // the first one's
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
}

}  // namespace
}  // namespace dynmo::runtime
