// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replicas x pipeline ranks. All replicas run one plan on different micro-batches; rank p of
// replica r is rank r x P + p of the group, so one replica's ranks are neighbours.

#include <memory>
#include <string>

#include "dynmo/core/ids.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// One rank's views of its group. One thread, as its transport.
class Grid {
 public:
  // The group must outlive it. Requires a size that `replicas` divides.
  Grid(transport::Transport& world, int replicas);

  [[nodiscard]] int replicas() const { return replicas_; }
  [[nodiscard]] int ranks() const { return world_.size() / replicas_; }  // of a pipeline
  [[nodiscard]] int replica() const { return world_.rank().value / ranks(); }

  [[nodiscard]] transport::Transport& world() const { return world_; }
  // The ranks of this replica.
  [[nodiscard]] transport::Transport& pipeline() const { return pipeline_ ? *pipeline_ : world_; }
  // The ranks with this one's layers, by replica.
  [[nodiscard]] transport::Transport& peers() const { return *peers_; }

  // In the group: rank `rank` of replica `replica`.
  [[nodiscard]] Rank world_rank(int replica, Rank rank) const {
    return Rank(replica * ranks() + rank.value);
  }
  // The ranks of the group that are rank `rank` of their replica, for people: "rank 1", "ranks 1,
  // 3".
  [[nodiscard]] std::string name_of(Rank rank) const;

 private:
  transport::Transport& world_;
  int replicas_;
  std::unique_ptr<transport::Transport> pipeline_;  // none: the group is one pipeline
  std::unique_ptr<transport::Transport> peers_;
};

}  // namespace dynmo::runtime
