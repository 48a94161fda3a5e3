// SPDX-License-Identifier: Apache-2.0
#pragma once

// The losses of ranks that a run has survived decide when it gives up on a step, and when others
// are started for those that are gone.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"

namespace dynmo::train {

class Losses {
 public:
  explicit Losses(const config::Config::Elastic& config) : respawns_(config.respawn) {}

  // kBadInput: elastic.respawn, where `dynmo train` has not started the ranks.
  [[nodiscard]] Expected<void> check_respawn() const;
  // Losses since the run has done more than `reached` steps.
  struct Count {
    std::int64_t reached = -1;
    int times = 0;
  };
  [[nodiscard]] const Count& count() const { return count_; }
  // All ranks know this of a new loss alike. kPeerLost where they are too_many().
  [[nodiscard]] Expected<void> note(Count now, const Error& why);
  // The same step was lost three times: no rank tries it once more.
  [[nodiscard]] bool too_many() const;
  // So many ranks are missing from now on: later, the more losses there were lately.
  void will_respawn(int ranks);
  // Between two steps: has the missing ranks started, if this is the rank that leads and it is
  // time; a line for people.
  [[nodiscard]] std::optional<std::string> respawn(bool leads);

 private:
  bool respawns_;
  Count count_;
  int missing_ = 0;  // ranks that are to be started
  int lately_ = 0;   // losses that each came soon after another
  std::chrono::steady_clock::time_point newest_ = {};
  std::chrono::steady_clock::time_point respawn_at_ = {};
};

}  // namespace dynmo::train
