// SPDX-License-Identifier: Apache-2.0
#pragma once

// When a run takes snapshots of its layers (runtime/snapshot.h), from which it goes on after the
// loss of a rank. Each group begins with one; from then on they come so seldom that they take no
// more than elastic.snapshot_cost of the time of the steps.

#include <cstdint>
#include <optional>
#include <string>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/elastic/member.h"
#include "dynmo/train/generation.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Called by all ranks alike.
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
  // Before step `step`: whether one is to be taken. (None of one rank: nobody would keep it.)
  [[nodiscard]] bool due(std::int64_t step, int ranks) const {
    return wanted_ && ranks > 1 && (!next_ || step >= *next_);
  }
  struct Taken {
    std::string line = {};                // for people; "": nothing is to be said
    std::vector<WorldRank> keepers = {};  // that layers were sent to, by rank; empty: none were
  };
  // Takes it, in the group of these members. No rank takes any more where one of them has too
  // little memory.
  [[nodiscard]] Expected<Taken> take(GroupRun& group, const elastic::View& members,
                                     transport::Transport& transport);

 private:
  [[nodiscard]] Expected<std::string> missing_memory(const GroupRun& group,
                                                     const elastic::View& members,
                                                     transport::Transport& transport) const;

  bool wanted_;
  double cost_;
  std::optional<std::int64_t> next_ = {};  // step before which; none: the group's first
  double step_s_ = 0;                      // of all steps since the last one
  std::int64_t steps_ = 0;
};

}  // namespace dynmo::train
