// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where the groups of an elastic run come from: one after another, each with its own transport. A
// run asks for the next one; who the ranks are has been agreed on before.

#include <optional>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/member.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

class Groups {
 public:
  virtual ~Groups() = default;

  // The one in force. Ends with the next change.
  [[nodiscard]] virtual transport::Transport& group() = 0;
  // This process. Its number counts once the run has given it one.
  [[nodiscard]] virtual const elastic::Member& self() const = 0;
  // Whether somebody (SIGTERM) has asked this process to leave.
  [[nodiscard]] virtual bool asked_to_leave() const { return false; }
  // Where a process that joins finds the group of `view`; its rank and number are the caller's to
  // fill in. At the leader.
  [[nodiscard]] virtual elastic::Place place_in(const elastic::View& view) const = 0;
  // Called by all ranks of the group between two steps with equal views: the group ends everywhere,
  // and those that are in `next` form the next one. nullopt: this process is not, and has left.
  // kPeerLost where a rank is lost meanwhile.
  [[nodiscard]] virtual Expected<std::optional<WorldRank>> change(const elastic::View& next) = 0;
};

}  // namespace dynmo::train
