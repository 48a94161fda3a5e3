// SPDX-License-Identifier: Apache-2.0
#pragma once

// A group as a grid of two axes: replica x position. All replicas run one plan on different
// micro-batches. Position p of replica r is rank r x P + p of the group, so one replica's ranks are
// neighbours.

#include <memory>
#include <string>
#include <vector>

#include "dynmo/transport/place.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// One rank's views of its group. Belongs to one thread, like its transport.
class Grid {
 public:
  // Divides the group into `replicas`. The group must outlive the grid. Requires a size that is a
  // multiple of `replicas`.
  Grid(Transport& world, int replicas);

  [[nodiscard]] const Axes& axes() const { return axes_; }
  [[nodiscard]] int replicas() const { return axes_.replicas; }
  [[nodiscard]] int positions() const { return axes_.positions; }
  // Returns the number of this rank in the group. replica() and position() return its places in the
  // grid.
  [[nodiscard]] WorldRank rank() const { return rank_; }
  [[nodiscard]] int replica() const { return axes_.place(rank()).replica; }
  [[nodiscard]] Rank position() const { return axes_.place(rank()).position; }
  [[nodiscard]] WorldRank world_rank(const Place& place) const { return axes_.world_rank(place); }

  [[nodiscard]] Transport& world() const { return world_; }
  // Returns the axis of positions: the ranks of this replica, numbered by position.
  [[nodiscard]] Transport& pipeline() const { return pipeline_ ? *pipeline_ : world_; }
  // Returns the axis of replicas: the ranks that hold the same layers, numbered by replica.
  [[nodiscard]] Transport& peers() const { return *peers_; }

  // Returns the ranks of the group at a position as text: "rank 1", "ranks 1, 3". Requires one of
  // the grid.
  [[nodiscard]] std::string name_of(Rank position) const;

 private:
  Transport& world_;
  // Copies, known after the transport has ended. The numbers are those of the group's ranks in
  // messages to users.
  WorldRank rank_;
  std::vector<int> numbers_;
  Axes axes_;
  // Null if the group is one pipeline.
  std::unique_ptr<Transport> pipeline_;
  std::unique_ptr<Transport> peers_;
};

// Makes a group of some ranks of a group, in which `members[i]` is rank i. The group must outlive
// the result. Requires different ranks of the group, including the caller's.
//
// A subset adds no connections: its messages are the group's. So two subsets that share a pair of
// ranks must use different tags, and an error ends the whole group.
[[nodiscard]] std::unique_ptr<Transport> subset(Transport& group, std::vector<WorldRank> members);

}  // namespace dynmo::transport
