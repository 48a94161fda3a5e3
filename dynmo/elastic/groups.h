// SPDX-License-Identifier: Apache-2.0
#pragma once

// The source of an elastic run's groups: one after another, each with its own transport. Before a
// run requests the next group, its ranks have agreed on the members.
//
// The next group forms beside the group in force. That group ends only when all its ranks have
// agreed that the next one works. Until then a fault of the next group, such as a newcomer that
// dies, is no loss of the run (docs/decisions/016-the-old-group-decides.md).

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/member.h"
#include "dynmo/transport/transport.h"

namespace dynmo::elastic {

// The loss of a rank, from the view of a remaining member.
struct Loss {
  const View& before;         // members of the group in force
  Generation generation = 0;  // of the newest plan
  // The number of remaining members is rounded down to a multiple of it. The last ones leave.
  int replicas = 1;
  Error why;
  // Called while this process looks for other survivors. Returns whether it no longer needs them.
  std::function<bool()> needs_nobody = [] { return false; };
};

// The members that continue.
struct Survival {
  // A view without this process means that it has left.
  View view;
  // Members that are alive but are not in the view. They leave.
  std::vector<MemberId> spares = {};
};

class Groups {
 public:
  virtual ~Groups() = default;

  // Returns the group in force, until the next one is taken.
  [[nodiscard]] virtual transport::Transport& group() = 0;
  // Returns this process. Its number is valid once the run has assigned one.
  [[nodiscard]] virtual const Member& self() const = 0;
  // Returns whether this process was asked to leave (SIGTERM).
  [[nodiscard]] virtual bool asked_to_leave() const { return false; }
  // Returns the address at which other ranks of the group reach this process.
  [[nodiscard]] virtual std::string address() const = 0;

  // Begins a change between two steps. Only the first rank of the next group calls it, and listens
  // from now on. Returns the place where that group meets. The caller fills in a member's rank and
  // number.
  [[nodiscard]] virtual Expected<Place> open(const View& next) = 0;
  // Forms the next group, at all its ranks. Calls `give_up` meanwhile, whose error ends the forming
  // for all. The transport lives until drop(), or until a later group is taken.
  using GiveUp = std::function<std::optional<Error>()>;
  [[nodiscard]] virtual Expected<transport::Transport*> form(const View& next, const Place& place,
                                                             const GiveUp& give_up) = 0;
  // Keeps the group in force. The next one, complete or not, ends for all its ranks.
  virtual void drop(const Error& why) = 0;
  // Ends the group in force, at all its ranks, and puts the next one in force. Returns false if
  // this process is not in the next group and has left. Returns kPeerLost if a rank is lost
  // meanwhile.
  [[nodiscard]] virtual Expected<bool> take() = 0;

  // Watches the members of a group that is or will be in force. From now on the end of their
  // processes is noticed at once, if that is possible.
  virtual void watch(const View& view) { static_cast<void>(view); }

  // Returns the failure of the group in force, if it has failed.
  [[nodiscard]] virtual std::optional<Error> failure() const { return std::nullopt; }
  // Returns a line for the user about what works worse in this process, once.
  [[nodiscard]] virtual std::optional<std::string> take_warning() { return std::nullopt; }
  // Returns the time at which this process learned of the failure, if it is known.
  [[nodiscard]] virtual std::optional<std::chrono::steady_clock::time_point> failed_at() const {
    return std::nullopt;
  }
  // Continues after a loss. Every remaining member of the group calls it. Ends the group in force
  // and the next one. The remaining members form another group, which is in force when this
  // returns. All of them get the same view, with their numbers. Returns an error if they cannot
  // continue.
  [[nodiscard]] virtual Expected<Survival> survive(const Loss& loss) { return loss.why; }

  // Checks that `next` keeps more than half of every view with a left-out member that may be alive
  // (quorum.h). Otherwise returns kInfeasible. All ranks call it before they agree on a change.
  [[nodiscard]] virtual Expected<void> may_change(const View& next) {
    static_cast<void>(next);
    return {};
  }
  // Returns the facts about views with left-out members that the members of the next group must
  // know(). The first rank of that group sends them to the other members when the group forms.
  [[nodiscard]] virtual Json standing(const View& next) const {
    static_cast<void>(next);
    return nullptr;
  }
  [[nodiscard]] virtual Expected<void> know(const Json& standing) {
    static_cast<void>(standing);
    return {};
  }
};

}  // namespace dynmo::elastic
