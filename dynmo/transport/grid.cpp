// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/grid.h"

#include <fmt/format.h>

#include "dynmo/core/check.h"
#include "dynmo/transport/subset.h"

namespace dynmo::transport {

namespace {

Axes axes_of(const Transport& world, int replicas) {
  DYNMO_CHECK(replicas >= 1 && world.size() % replicas == 0,
              "a number of replicas that divides {} ranks, got {}", world.size(), replicas);
  return {replicas, world.size() / replicas};
}

}  // namespace

Grid::Grid(Transport& world, int replicas)
    : world_(world), rank_(world.rank().value), axes_(axes_of(world, replicas)) {
  for (int i = 0; i < world.size(); ++i) numbers_.push_back(world.number_of(Member(i)));
  std::vector<WorldRank> peers;
  for (int i = 0; i < replicas; ++i) peers.push_back(world_rank({i, position()}));
  peers_ = subset(world, std::move(peers));
  if (replicas == 1) return;
  std::vector<WorldRank> pipeline;
  for (int i = 0; i < positions(); ++i) {
    pipeline.push_back(world_rank({replica(), Rank(i)}));
  }
  pipeline_ = subset(world, std::move(pipeline));
}

std::string Grid::name_of(Rank position) const {
  std::string text = replicas() > 1 ? "ranks" : "rank";
  for (int i = 0; i < replicas(); ++i) {
    text += fmt::format("{} {}", i > 0 ? "," : "", numbers_[world_rank({i, position}).index()]);
  }
  return text;
}

}  // namespace dynmo::transport
