// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/grid.h"

#include <gtest/gtest.h>

#include "dynmo/core/check.h"
#include "dynmo/transport/in_process.h"

namespace dynmo::transport {
namespace {

TEST(Grid, EveryPlaceHasOneWorldRank) {
  const Axes axes{.replicas = 3, .positions = 4};
  EXPECT_EQ(axes.ranks(), 12);
  for (int i = 0; i < axes.ranks(); ++i) {
    EXPECT_EQ(axes.world_rank(axes.place(WorldRank(i))), WorldRank(i));
  }
  EXPECT_EQ(axes.place(WorldRank(6)), (Place{.replica = 1, .position = Rank(2)}));
}

TEST(Grid, NumbersPipelinesByPositionAndPeersByReplica) {
  const auto done = run_ranks(6, [](Transport& world) -> Expected<void> {
    const Grid grid(world, 2);
    EXPECT_EQ(grid.positions(), 3);
    EXPECT_EQ(grid.rank().value, grid.replica() * 3 + grid.position().value);
    EXPECT_EQ(grid.pipeline().size(), 3);
    EXPECT_EQ(grid.pipeline().rank().value, grid.position().value);
    EXPECT_EQ(grid.peers().size(), 2);
    EXPECT_EQ(grid.peers().rank().value, grid.replica());
    EXPECT_EQ(grid.name_of(Rank(1)), "ranks 1, 4");
    return {};
  });
  EXPECT_TRUE(done) << done.error().message;
}

TEST(Grid, WantsReplicasOfOneSize) {
  const auto group = make_in_process_group(3);
  EXPECT_THROW(Grid(*group[0], 2), CheckFailure);
  EXPECT_EQ(Grid(*group[0], 1).name_of(Rank(2)), "rank 2");
}

}  // namespace
}  // namespace dynmo::transport
