// SPDX-License-Identifier: Apache-2.0
#pragma once

// The times of a run's snapshots of its layers (runtime/snapshot.h), from which it continues after
// the loss of a rank. Each group begins with one. Later ones are so rare that they take at most
// elastic.snapshot_cost of the time of the steps.

#include <cstdint>
#include <optional>
#include <string>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/elastic/member.h"
#include "dynmo/train/generation.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Decides when snapshots are due, and takes them. All ranks make equal calls.
class Snapshots {
 public:
  explicit Snapshots(const config::Config& config)
      : wanted_(config.elastic.enabled && config.elastic.snapshots == "auto"),
        cost_(config.elastic.snapshot_cost) {}

  void begin_group() { next_.reset(); }
  void observe(double step_s) {
    step_s_ += step_s;
    ++steps_;
  }
  // Returns whether to take a snapshot before step `step`. A single rank takes none, because no
  // other rank could keep it.
  [[nodiscard]] bool due(std::int64_t step, int ranks) const {
    return wanted_ && ranks > 1 && (!next_ || step >= *next_);
  }
  struct Taken {
    std::string line = {};                // for the user; "": none
    std::vector<WorldRank> keepers = {};  // ranks that layers were sent to, by rank; empty: none
  };
  // Takes a snapshot, in the group of these members. If a rank has too little memory, no rank takes
  // further snapshots. Fails with kPeerLost.
  [[nodiscard]] Expected<Taken> take(GroupRun& group, const elastic::View& members,
                                     transport::Transport& transport);

 private:
  [[nodiscard]] Expected<std::string> missing_memory(const GroupRun& group,
                                                     const elastic::View& members,
                                                     transport::Transport& transport) const;

  bool wanted_;
  double cost_;
  std::optional<std::int64_t> next_ = {};  // step before the next one; none: the group's first
  double step_s_ = 0;                      // of all steps since the last snapshot
  std::int64_t steps_ = 0;
};

}  // namespace dynmo::train
