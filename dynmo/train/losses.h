// SPDX-License-Identifier: Apache-2.0
#pragma once

// The losses of ranks that a run has survived decide when it gives up on a step, and when others
// are started for those that are gone.

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"

namespace dynmo::train {

// Names a loss before the ranks know each other, with which the run ends: those that know the
// others by then may be too few. Other errors stay as they are.
[[nodiscard]] Error named_as_early(const Error& why);

class Losses {
 public:
  explicit Losses(const config::Config::Elastic& config) : respawns_(config.respawn) {}

  // kBadInput: elastic.respawn, where `dynmo train` has not started the ranks.
  [[nodiscard]] Expected<void> check_respawn() const;
  // Losses by the number of steps that were done before, as long as no loss came after more steps:
  // a step that fails may do so a little before its end, or a little after.
  using Counts = std::map<std::int64_t, int>;
  // Adds one after `reached` steps to what ranks know; newcomers do not know all.
  [[nodiscard]] static Counts with_another(const std::vector<Counts>& known, std::int64_t reached);
  [[nodiscard]] const Counts& counts() const { return counts_; }
  // All ranks know this of a new loss alike. kPeerLost where there are too_many().
  [[nodiscard]] Expected<void> note(Counts now, const Error& why);
  // The same step was lost three times: no rank tries it once more.
  [[nodiscard]] bool too_many() const;
  // So many ranks are missing from now on: later, the more losses there were lately.
  void will_respawn(int ranks);
  // Between two steps: has the missing ranks started, if this is the rank that leads and it is
  // time; a line for people.
  [[nodiscard]] std::optional<std::string> respawn(bool leads);

 private:
  bool respawns_;
  Counts counts_;
  int missing_ = 0;  // ranks that are to be started
  int lately_ = 0;   // losses that each came soon after another
  std::chrono::steady_clock::time_point newest_ = {};
  std::chrono::steady_clock::time_point respawn_at_ = {};
};

}  // namespace dynmo::train
