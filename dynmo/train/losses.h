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
  // The run had done `reached` steps. kPeerLost, the same at all ranks, at the third loss since it
  // has done more.
  [[nodiscard]] Expected<void> note(std::int64_t reached, const Error& why);
  // So many ranks are missing from now on: later, the more losses there were lately.
  void will_respawn(int ranks);
  // Between two steps: has the missing ranks started, if this is the rank that leads and it is
  // time; a line for people.
  [[nodiscard]] std::optional<std::string> respawn(bool leads);

 private:
  bool respawns_;
  std::int64_t reached_ = -1;  // steps done at the newest loss
  int times_ = 0;              // losses since more were done
  int missing_ = 0;            // ranks that are to be started
  int lately_ = 0;             // losses that each came soon after another
  std::chrono::steady_clock::time_point newest_ = {};
  std::chrono::steady_clock::time_point respawn_at_ = {};
};

}  // namespace dynmo::train
