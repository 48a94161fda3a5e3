// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the processes that are left of a group find each other after a loss. The lowest that lives
// calls the others: it says who goes on, and where they meet. Should it end meanwhile, too, the
// next lowest does the same, and whoever has met without another meets again.
//
// Nobody is left out that may live. Whether a process of this host has ended is certain; one of
// another host has where that host says that nobody listens at its port any more. One that does not
// answer may live, and nobody calls before more is known.

#include <functional>
#include <optional>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/control_plane.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/elastic/member.h"

namespace dynmo::train {

// Kills the processes of these members on this host that somebody has stopped (SIGSTOP): nobody
// knows for how long, and the others do not wait. (One that a debugger holds is left alone.)
void end_stopped(const elastic::View& members, const std::string& host);

// Those of the living that go on: as many as the replicas divide. Who leaves is one whose position
// in the pipeline another one of them has, so that their layers are there, else the last.
[[nodiscard]] elastic::View as_many_as_divide(elastic::View living, const elastic::View& before,
                                              int replicas);

// The members that go on, and where their first one listens.
struct MeetingCall {
  elastic::View next = {};
  elastic::Place place = {};
};
[[nodiscard]] std::string text_of(const MeetingCall& call);

// One process's part of it.
class Survivors {
 public:
  // Asks another process's control plane (elastic/control_plane.h).
  using Ask = std::function<elastic::Answer(const elastic::Member&)>;
  Survivors(const elastic::Loss& loss, elastic::Member self, Ask ask);

  [[nodiscard]] elastic::Fate fate_of(const elastic::Member& member) const;
  // The call of another process that lives, each once.
  [[nodiscard]] std::optional<MeetingCall> heard();
  // Whether this process is the lowest that lives, for certain, and calls the others.
  [[nodiscard]] bool calls() const;
  // The view that it calls together: of those that live as many as the replicas divide, under a
  // generation that no call has had. No members: too few are left. nullopt: of one nothing is known
  // as yet.
  [[nodiscard]] std::optional<elastic::View> next();
  // The members of which nothing is known.
  [[nodiscard]] std::string unknown() const;

 private:
  const elastic::View& before_;
  elastic::Member self_;
  Ask ask_;
  int replicas_;
  Generation newest_;  // of views and plans that this process knows
  Generation heard_;
};

}  // namespace dynmo::train
