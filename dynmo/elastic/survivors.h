// SPDX-License-Identifier: Apache-2.0
#pragma once

// Finds the remaining processes of a group after a loss. The lowest living member calls the others:
// it says which members continue, and where they meet. If it ends meanwhile, the next lowest does
// the same. Members that have met without another member meet again.
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

// Kills the members on this host whose processes are stopped (SIGSTOP). The stop may last for any
// time, and the other members do not wait. A process that a debugger holds is left alone.
void end_stopped(const View& members, const std::string& host);

// Returns the living members that continue. Their number is rounded down to a multiple of
// `replicas`. A member leaves if another living member has its position in the pipeline, because
// their layers then still exist. Without such a member the last one leaves.
[[nodiscard]] View as_many_as_divide(View living, const View& before, int replicas);

// The members that continue, and where their first one listens.
struct MeetingCall {
  View next = {};
  Place place = {};
  std::vector<MemberId> spares = {};  // living members that leave
  std::vector<MemberId> dead = {};    // members of the views that count
  // Set if the members are more than half only after the spares have ended. They meet then.
  bool waits = false;

  [[nodiscard]] bool spares_member(MemberId id) const;
};
[[nodiscard]] std::string text_of(const MeetingCall& call);

// One process's part in finding the others.
class Survivors {
 public:
  using Clock = std::chrono::steady_clock;
  // Asks another process's control plane (control_plane.h). Several threads call it at a time.
  using Ask = std::function<Answer(const Member&)>;
  // Begins the search. A member that is silent for `patience` may be left out. If another such
  // member answers again, the wait begins again. The facts found are noted in `standing`.
  Survivors(const Loss& loss, Member self, Ask ask, Standing& standing,
            Clock::duration patience = std::chrono::seconds(3));

  // Looks which members live. The functions below refer to the newest look.
  void look(Clock::time_point now);
  // Returns the call of another living process, each call once. A call may omit this process. It is
  // then a spare, or the others have continued without it.
  [[nodiscard]] std::optional<MeetingCall> heard();
  // Returns this process's own call, if it is the lowest that lives and may call the others. The
  // number of living members is rounded down to a multiple of the replicas. The generation is one
  // that no call has had.
  //
  // A call without members means that too few are left. A call that waits is made again until the
  // spares have ended.
  [[nodiscard]] std::optional<MeetingCall> call();
  // Returns why the members of a call cannot all come, if that is so.
  [[nodiscard]] std::optional<Error> misses(const View& next) const;
  // Returns the members that may live and without which none continues.
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
