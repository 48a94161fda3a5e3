// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/grid.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "dynmo/core/check.h"

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
  DYNMO_CHECK(position.value >= 0 && position.value < positions(), "a position below {}, got {}",
              positions(), position);
  std::string text = replicas() > 1 ? "ranks" : "rank";
  for (int i = 0; i < replicas(); ++i) {
    text += fmt::format("{} {}", i > 0 ? "," : "", numbers_[world_rank({i, position}).index()]);
  }
  return text;
}

namespace {

class Subset final : public Transport {
 public:
  Subset(Transport& group, std::vector<WorldRank> members, Member rank)
      : group_(group), members_(std::move(members)), rank_(rank) {}

  [[nodiscard]] Member rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return static_cast<int>(members_.size()); }
  [[nodiscard]] int number_of(Member rank) const override { return group_.number_of(member(rank)); }
  void abort(const Error& why) override { group_.abort(why); }

  std::unique_ptr<Operation> send(Member to, Tag tag, std::span<const std::byte> bytes) override {
    return group_.send(member(to), tag, bytes);
  }
  std::unique_ptr<Operation> receive(Member from, Tag tag, std::span<std::byte> bytes) override {
    return group_.receive(member(from), tag, bytes);
  }

 private:
  Member member(Member peer) const {
    DYNMO_CHECK(peer.value >= 0 && peer.value < size(), "a peer in a subset of {}, got {}", size(),
                peer);
    return Member(members_[peer.index()].value);
  }

  Transport& group_;
  std::vector<WorldRank> members_;
  Member rank_;  // in the subset
};

}  // namespace

std::unique_ptr<Transport> subset(Transport& group, std::vector<WorldRank> members) {
  const std::set<WorldRank> different(members.begin(), members.end());
  const auto self = std::find(members.begin(), members.end(), WorldRank(group.rank().value));
  DYNMO_CHECK(self != members.end() && different.size() == members.size() &&
                  different.begin()->value >= 0 && different.rbegin()->value < group.size(),
              "different ranks of a group of {}, {} among them", group.size(), group.rank());
  const Member rank(static_cast<int>(self - members.begin()));
  return std::make_unique<Subset>(group, std::move(members), rank);
}

}  // namespace dynmo::transport
