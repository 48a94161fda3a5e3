// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the processes that are left of a group find each other after a loss, where all of them are on
// one host. Whether a process has ended is certain there, so nobody has to be asked: the lowest
// that lives tells in a file of the run's folder who goes on, and where they meet. Should it end
// meanwhile, too, the next lowest does the same, and whoever has met without another meets again.

#include <filesystem>
#include <optional>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/elastic/member.h"

namespace dynmo::train {

// Whether the process of a member on this host has not ended.
[[nodiscard]] bool lives(const elastic::Member& member);
// Kills the processes of these members on this host that somebody has stopped (SIGSTOP): nobody
// knows for how long, and the others do not wait. (One that a debugger holds is left alone.)
void end_stopped(const elastic::View& members);
[[nodiscard]] bool are_on_host(const elastic::View& view, const std::string& host);

// Those of the living that go on: as many as the replicas divide. Who leaves is one whose position
// in the pipeline another one of them has, so that their layers are there, else the last.
[[nodiscard]] elastic::View as_many_as_divide(elastic::View living, const elastic::View& before,
                                              int replicas);

// The members that go on, and where their first one listens.
struct MeetingCall {
  elastic::View next = {};
  elastic::Place place = {};
};

// One process's part of it.
class Survivors {
 public:
  Survivors(const elastic::Loss& loss, elastic::MemberId self);

  // Whether this process is the lowest that lives, and calls the others.
  [[nodiscard]] bool calls() const;
  // The view that it calls together: of those that live as many as the replicas divide, under a
  // generation that no call has had. No members: too few are left.
  [[nodiscard]] elastic::View next();
  // The others hear it; kBadInput where the file cannot be written.
  [[nodiscard]] Expected<void> tell(const MeetingCall& call);
  // The call of another process, each once.
  [[nodiscard]] std::optional<MeetingCall> heard();
  // All that go on have met: the call is over. Returns its file where others have still to hear in
  // it that they are to leave; whoever has called removes it at the end.
  [[nodiscard]] std::filesystem::path met() const;

 private:
  [[nodiscard]] elastic::View living() const;

  const elastic::View& before_;
  elastic::MemberId self_;
  int replicas_;
  Generation newest_;  // of views and plans that this process knows
  Generation heard_;
  bool called_ = false;  // the newest call
  bool leaves_some_ = false;
  std::filesystem::path file_;
};

}  // namespace dynmo::train
