// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the processes that are left of a group find each other after a loss. The lowest that lives
// calls the others: it says who goes on, and where they meet. Should it end meanwhile, too, the
// next lowest does the same, and whoever has met without another meets again.
//
// Whether a process of this host has ended is certain; one of another host has where that host says
// that nobody listens at its port any more. One that does not answer may live. It is left out only
// by more than half of those that may (quorum.h), and after a while.

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/control_plane.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/elastic/member.h"
#include "dynmo/elastic/quorum.h"

namespace dynmo::elastic {

// Kills the processes of these members on this host that somebody has stopped (SIGSTOP): nobody
// knows for how long, and the others do not wait. (One that a debugger holds is left alone.)
void end_stopped(const View& members, const std::string& host);

// Those of the living that go on: as many as the replicas divide. Who leaves is one whose position
// in the pipeline another one of them has, so that their layers are there, else the last.
[[nodiscard]] View as_many_as_divide(View living, const View& before, int replicas);

// The members that go on, and where their first one listens.
struct MeetingCall {
  View next = {};
  Place place = {};
  std::vector<MemberId> spares = {};  // that live, and leave
  std::vector<MemberId> dead = {};    // of the views that count
  // They are more than half once the spares have ended: nobody meets before.
  bool waits = false;

  [[nodiscard]] bool spares_member(MemberId id) const;
};
[[nodiscard]] std::string text_of(const MeetingCall& call);

// One process's part of it.
class Survivors {
 public:
  using Clock = std::chrono::steady_clock;
  // Asks another process's control plane (control_plane.h). Several threads at a time.
  using Ask = std::function<Answer(const Member&)>;
  // A member that has not answered for `patience` may be left out; where another such one answers
  // again, after as long again. What is learned is noted in `standing`.
  Survivors(const Loss& loss, Member self, Ask ask, Standing& standing,
            Clock::duration patience = std::chrono::seconds(3));

  // Looks who lives. What follows is about the newest look.
  void look(Clock::time_point now);
  // The call of another process that lives, each once; also one without this process: it is spare,
  // or the others have gone on without it.
  [[nodiscard]] std::optional<MeetingCall> heard();
  // This process's own, where it is the lowest that lives and may call the others: of those that
  // live as many as the replicas divide, under a generation that no call has had. No members: too
  // few are left. One that waits is made again until the spares have ended.
  [[nodiscard]] std::optional<MeetingCall> call();
  // Why the members of a call cannot all come, if they can't.
  [[nodiscard]] std::optional<Error> misses(const View& next) const;
  // The members that may live and whom nobody goes on without.
  [[nodiscard]] std::string unknown() const;

 private:
  [[nodiscard]] Fate fate_of(const Member& member) const;
  [[nodiscard]] bool is_given_up(const Member& member) const;
  void note(const Member& member, Answer answer, Clock::time_point now);
  [[nodiscard]] bool may_form(const View& next);

  const View& before_;
  Member self_;
  Ask ask_;
  Standing& standing_;
  Clock::duration patience_;
  int replicas_;
  Generation newest_;  // of views and plans that this process knows
  Generation heard_;
  bool asks_all_ = false;            // also members of views before
  std::vector<MemberId> dismissed_;  // spares of calls that have waited
  Clock::time_point now_ = {};
  std::map<MemberId, Answer> answers_;
  std::map<MemberId, Clock::time_point> silent_since_;
  // One that was silent for too long has answered again: others may be about to.
  Clock::time_point back_ = {};
};

}  // namespace dynmo::elastic
