// SPDX-License-Identifier: Apache-2.0
#pragma once

// The losses of ranks that a run has survived. They decide when the run stops repeating a step, and
// when replacements for lost ranks are started.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"

namespace dynmo::train {

// Rewords a loss that happened before the ranks know each other. Such a loss ends the run, because
// the ranks that know the others may be too few. Returns other errors unchanged.
[[nodiscard]] Error named_as_early(const Error& why);

class Losses {
 public:
  explicit Losses(const config::Config::Elastic& config) : respawns_(config.respawn) {}

  // Checks elastic.respawn. Returns kBadInput if it is set but `dynmo train` has not started the
  // ranks.
  [[nodiscard]] Expected<void> check_respawn() const;
  // Losses by the number of steps done before them. A loss after more steps removes the earlier
  // entries. (Ranks may notice the loss of a step a little before or after its end.)
  using Counts = std::map<std::int64_t, int>;
  struct Known {
    Counts counts = {};
    Generation begun = -1;    // newest group in which a rank has begun a step
    Generation counted = -1;  // `begun` at the newest counted loss
  };
  // Merges what all ranks know, since newcomers do not know all. Then counts a loss after `reached`
  // steps, if a step was begun since the last one. Hosts that fail together may be noticed one in
  // the recovery from the other.
  [[nodiscard]] static Known with_another(const std::vector<Known>& known, std::int64_t reached);
  [[nodiscard]] const Known& known() const { return known_; }
  // Notes that this rank begins a step, or the work after one, in this group.
  void begin_step(Generation group) { known_.begun = std::max(known_.begun, group); }
  // Sets what is known after a new loss, which is equal on all ranks. Returns kPeerLost if
  // too_many().
  [[nodiscard]] Expected<void> note(Known now, const Error& why);
  // Returns whether the same step was lost three times. Then no rank repeats it.
  [[nodiscard]] bool too_many() const;
  // Notes that `ranks` ranks are missing. Starting others is delayed longer after several recent
  // losses.
  void will_respawn(int ranks);
  // Starts the missing ranks between two steps, if this rank is the leader and the delay has
  // passed. Returns a line for the user.
  [[nodiscard]] std::optional<std::string> respawn(bool leads);

 private:
  bool respawns_;
  Known known_;
  int missing_ = 0;  // ranks to start
  int lately_ = 0;   // losses that each came soon after another
  std::chrono::steady_clock::time_point newest_ = {};
  std::chrono::steady_clock::time_point respawn_at_ = {};
};

}  // namespace dynmo::train
