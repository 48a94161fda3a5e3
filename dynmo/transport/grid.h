// SPDX-License-Identifier: Apache-2.0
#pragma once

// A group as a grid of two axes: replica x position. All replicas run one plan on different
// micro-batches. Position p of replica r is rank r x P + p of the group, so one replica's ranks are
// neighbours.

#include <memory>
#include <string>

#include "dynmo/transport/place.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// One rank's views of its group. One thread, as its transport.
class Grid {
 public:
  // The group must outlive it. Requires a size that `replicas` divides.
  Grid(Transport& world, int replicas);

  [[nodiscard]] const Axes& axes() const { return axes_; }
  [[nodiscard]] int replicas() const { return axes_.replicas; }
  [[nodiscard]] int positions() const { return axes_.positions; }
  // The coordinates of this rank.
  [[nodiscard]] WorldRank rank() const { return rank_; }
  [[nodiscard]] int replica() const { return axes_.place(rank()).replica; }
  [[nodiscard]] Rank position() const { return axes_.place(rank()).position; }
  [[nodiscard]] WorldRank world_rank(const Place& place) const { return axes_.world_rank(place); }

  [[nodiscard]] Transport& world() const { return world_; }
  // Along the axis of positions: the ranks of this replica, numbered by position.
  [[nodiscard]] Transport& pipeline() const { return pipeline_ ? *pipeline_ : world_; }
  // Along the axis of replicas: the ranks with this one's layers, numbered by replica.
  [[nodiscard]] Transport& peers() const { return *peers_; }

  // The ranks of the group at a position, for people: "rank 1", "ranks 1, 3".
  [[nodiscard]] std::string name_of(Rank position) const;

 private:
  Transport& world_;
  WorldRank rank_;  // known when the transport is gone
  Axes axes_;
  std::unique_ptr<Transport> pipeline_;  // none: the group is one pipeline
  std::unique_ptr<Transport> peers_;
};

}  // namespace dynmo::transport
