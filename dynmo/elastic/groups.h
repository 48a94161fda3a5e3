// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where the groups of an elastic run come from: one after another, each with its own transport. A
// run asks for the next one; who the ranks are has been agreed on before.
//
// The next group forms beside the one in force, which ends only when all its ranks have agreed
// that the next one works: until then whatever goes wrong with it, such as a newcomer that dies,
// is no loss of the run (docs/decisions/016-the-old-group-decides.md).

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

// The loss of a rank, as one of those that are left finds it.
struct Loss {
  const View& before;         // the members of the group that was in force
  Generation generation = 0;  // of the newest plan
  int replicas = 1;           // as many members go on as they divide; the last others leave
  Error why;
  // Asked while this process looks for the others: it needs them no more.
  std::function<bool()> needs_nobody = [] { return false; };
};

// Those that go on.
struct Survival {
  View view;                          // one without this process: it has left
  std::vector<MemberId> spares = {};  // of the others those that live, and leave
};

class Groups {
 public:
  virtual ~Groups() = default;

  // The one in force, until the next one is taken.
  [[nodiscard]] virtual transport::Transport& group() = 0;
  // This process. Its number counts once the run has given it one.
  [[nodiscard]] virtual const Member& self() const = 0;
  // Whether somebody (SIGTERM) has asked this process to leave.
  [[nodiscard]] virtual bool asked_to_leave() const { return false; }
  // The address at which the others of the group reach this process.
  [[nodiscard]] virtual std::string address() const = 0;

  // A change, between two steps. At the first rank of the next group: from now on it listens there;
  // rank and number are the caller's to fill in.
  [[nodiscard]] virtual Expected<Place> open(const View& next) = 0;
  // At all ranks of the next group: forms it. `give_up` is asked meanwhile; its error ends the
  // forming for all. The transport lives until it is dropped, or another one is taken.
  using GiveUp = std::function<std::optional<Error>()>;
  [[nodiscard]] virtual Expected<transport::Transport*> form(const View& next, const Place& place,
                                                             const GiveUp& give_up) = 0;
  // The group in force goes on; the next one, or what there is of it, ends for all its ranks.
  virtual void drop(const Error& why) = 0;
  // At all ranks of the group in force: it ends, and the next one is in force. False: this process
  // is not in it, and has left. kPeerLost where a rank is lost meanwhile.
  [[nodiscard]] virtual Expected<bool> take() = 0;

  // Members of a group that is, or is to be, in force: the end of their processes is noticed at
  // once from now on where this can be.
  virtual void watch(const View& view) { static_cast<void>(view); }

  // Why the group in force has failed, if it has.
  [[nodiscard]] virtual std::optional<Error> failure() const { return std::nullopt; }
  // When this process learned of that, where it is known.
  [[nodiscard]] virtual std::optional<std::chrono::steady_clock::time_point> failed_at() const {
    return std::nullopt;
  }
  // After a loss, called by every member of the group that is left: it ends, with what there is of
  // the next one, and the members that are left form another, which is in force when this returns.
  // The same view at all of them, with their numbers. An error where they cannot go on.
  [[nodiscard]] virtual Expected<Survival> survive(const Loss& loss) { return loss.why; }

  // Somebody who was left out of a view may be alive (quorum.h): whether a change to `next` leaves
  // him too few to go on. kInfeasible. Asked at all ranks, before they agree on a change.
  [[nodiscard]] virtual Expected<void> may_change(const View& next) {
    static_cast<void>(next);
    return {};
  }
  // The members of the next group have to know this of such views: its first rank says it, and all
  // of them know it with that group.
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
