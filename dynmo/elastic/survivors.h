// SPDX-License-Identifier: Apache-2.0
#pragma once

// Finds the remaining processes of a group after a loss. The lowest living member calls the others:
// its call says which members continue, and where they meet. If it ends meanwhile, the next lowest
// member calls. If a called member is lost, too, the others meet again.
//
// The end of a process on this host is certain. A process on another host has ended if that host
// says that nothing listens at its port any more. A process that does not answer may live. It is
// left out only after a while, and only by more than half of the members that may live (quorum.h).

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

// Kills the members whose processes `self` sees stopped (SIGSTOP), because other members do not
// wait for them. A process that a debugger holds is left alone.
void end_stopped(const View& members, const Member& self);

// Returns the living members that continue. Their number is rounded down to a multiple of
// `replicas`. A member whose position in the pipeline another living member has leaves first, so
// that all layers still exist. If there is none, the last member leaves.
[[nodiscard]] View as_many_as_divide(View living, const View& before, int replicas);

// The members that continue, and where their first one listens.
struct MeetingCall {
  View next = {};
  Place place = {};
  std::vector<MemberId> spares = {};  // living members that leave
  std::vector<MemberId> dead = {};    // ended members of the views that count
  // Set if the members are a quorum only after the spares have ended. Then they meet only after
  // that.
  bool waits = false;

  [[nodiscard]] bool spares_member(MemberId id) const;
};
[[nodiscard]] std::string text_of(const MeetingCall& call);

// One process's part in finding the others.
class Survivors {
 public:
  using Clock = std::chrono::steady_clock;
  // Asks another process's control plane (control_plane.h). Several threads may call it at a time.
  using Ask = std::function<Answer(const Member&)>;
  // Begins the search. A member that is silent for `patience` may be left out. If a member answers
  // again after such a time, the wait for the others begins again. The facts found are noted in
  // `standing`.
  Survivors(const Loss& loss, Member self, Ask ask, Standing& standing,
            Clock::duration patience = std::chrono::seconds(3));

  // Finds which members live. The functions below refer to the newest look.
  void look(Clock::time_point now);
  // Returns the call of another living process, each call once. If a call omits this process, this
  // process is a spare, or the others have continued without it.
  [[nodiscard]] std::optional<MeetingCall> heard();
  // Returns this process's own call, if it is the lowest living member and may call the others. The
  // number of members is rounded down to a multiple of the replicas. The generation is above that
  // of every known call.
  //
  // A call without members means that too few are left. If a call waits, the caller repeats call()
  // until one does not.
  [[nodiscard]] std::optional<MeetingCall> call();
  // Returns kPeerLost if a member of a call cannot come, because it has ended or does not answer.
  [[nodiscard]] std::optional<Error> misses(const View& next) const;
  // Returns a list, for the user, of the silent members, which may live. Without them too few
  // remain.
  [[nodiscard]] std::string unknown() const;

 private:
  // The findings of the looks.
  struct Seen {
    Clock::time_point now = {};  // of the newest look
    std::map<MemberId, Answer> answers = {};
    std::map<MemberId, Clock::time_point> silent_since = {};
    // Time at which a member that was silent for too long has answered again. Others may follow.
    Clock::time_point back = {};
  };
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
  bool asks_all_ = false;            // also members of earlier views
  std::vector<MemberId> dismissed_;  // spares of calls that have waited
  Seen seen_;
};

}  // namespace dynmo::elastic
