// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/grid.h"

#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/transport/subset.h"

namespace dynmo::runtime {

Grid::Grid(transport::Transport& world, int replicas) : world_(world), replicas_(replicas) {
  DYNMO_CHECK(replicas >= 1 && world.size() % replicas == 0,
              "a number of replicas that divides {} ranks, got {}", world.size(), replicas);
  const Rank own(world.rank().value % ranks());
  std::vector<Rank> peers;
  for (int i = 0; i < replicas; ++i) peers.push_back(world_rank(i, own));
  peers_ = transport::subset(world, std::move(peers));
  if (replicas == 1) return;
  std::vector<Rank> pipeline;
  for (int i = 0; i < ranks(); ++i) pipeline.push_back(world_rank(replica(), Rank(i)));
  pipeline_ = transport::subset(world, std::move(pipeline));
}

std::string Grid::name_of(Rank rank) const {
  std::string text = replicas_ > 1 ? "ranks" : "rank";
  for (int i = 0; i < replicas_; ++i) {
    text += fmt::format("{} {}", i > 0 ? "," : "", world_rank(i, rank));
  }
  return text;
}

}  // namespace dynmo::runtime
