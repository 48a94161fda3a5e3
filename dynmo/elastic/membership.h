// SPDX-License-Identifier: Apache-2.0
#pragma once

// How members agree on who goes on after a loss: a state machine without sockets, threads or a
// clock. Its driver turns connections and time into events and does what the actions say; the same
// machine runs in tests/elastic, which try all orders of events.
//
// The members answer a loss with a ballot. The leader, which is the lowest member that is left,
// asks all to prepare; each promises to follow no older ballot, brings its main thread to rest and
// reports; the leader decides and asks all that stay to form; they note that they try, form a
// group, bring the layers in place, and install the view once all have done so. After any loss on
// the way the lowest that is left begins the next ballot.
//
// A planned change of the view needs no ballot: the group in force agrees on it
// (docs/decisions/016-the-old-group-decides.md). Its members tell the machine what they try, and
// whether it is taken or the old view is kept, so that a loss in the middle of a change finds out
// which of the two views counts.
//
// A view may be formed by more than half of the members, or by half of them with the lowest, of
// every view in question, those not counted that are gone for certain. In question are the newest
// view, the tries since, and views before it of which somebody left out may be alive
// (docs/decisions/015-views-with-open-ends.md).

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "dynmo/elastic/member.h"
#include "dynmo/elastic/messages.h"
#include "dynmo/elastic/recovery.h"

namespace dynmo::elastic {

// All hold in a run. The explorer takes one away to see that it is needed.
struct Rules {
  bool attempts = true;   // a quorum is wanted of views that were tried, too
  bool ties = true;       // half is enough only with the lowest
  bool promises = true;   // who has reported to a ballot takes part in no older one
  bool open_ends = true;  // views before the last count as long as members of them may be alive
  bool releases = true;   // who leaves as planned is not needed for a quorum of such a view
  friend bool operator==(const Rules&, const Rules&) = default;
};

struct Settings {
  Model model = {};
  int ranks_min = 1;
  int losses_max = 2;    // in the same step; one more ends the run
  int attempts_max = 8;  // to form a view; one more ends the run
  Rules rules = {};
  friend bool operator==(const Settings&, const Settings&) = default;
};

enum class Phase : std::uint8_t { kRun, kQuiet, kReported, kForming, kEnded };

// A leader's ballot.
struct Proposal {
  enum class Stage : std::uint8_t { kCollecting, kForming };
  Ballot ballot;
  Stage stage = Stage::kCollecting;
  std::vector<Reported> reports = {};
  std::optional<Form> form = {};
};

// One member's state; the leader's has a proposal. A value: copying it forks the machine.
struct Membership {
  Settings settings = {};
  Member self = {};
  Phase phase = Phase::kRun;
  Standing standing = {};
  Generation seen = 0;  // the highest number of any ballot, view or plan
  Ballot promised = {};
  std::vector<MemberId> silent = {};  // ascending
  std::optional<Report> report = {};  // of a main thread at rest
  std::optional<Form> forming = {};
  bool group_failed = false;  // and nobody has asked to prepare since
  std::optional<Proposal> proposal = {};
};

// The driver's inputs.
struct Received {
  MemberId from;
  Message message;
};
// The driver learns it from the connection, the pidfd, a fence or the cluster. A connection that
// was lost and is made anew is told as kAlive at both ends, after which each says again what the
// other may have missed.
struct FateTold {
  MemberId member;
  Fate fate = Fate::kAlive;
};
struct Quieted {  // the main thread is at rest, as Quiet asked for
  Report report;
};
struct Formed {};     // the digests of all members of `forming` agree
struct GroupFailed {  // the group of this generation, installed or forming
  Generation generation = 0;
};
struct NumberTaken {  // by a plan
  Generation generation = 0;
};
// A planned change, from the main thread of a member of the view in force.
struct Tries {  // before the member votes yes; only in Phase::kRun
  View next;
};
struct Kept {};   // one of them has voted no: the view in force stays
struct Taken {};  // all have voted yes, and all know: `next` is in force, and who is not in it ends
struct Retry {};  // now and then: what is not answered is said again
using Event = std::variant<Received, FateTold, Quieted, Formed, GroupFailed, NumberTaken, Tries,
                           Kept, Taken, Retry>;

// The driver's actions. A message that cannot be sent is told as a fate.
struct Send {
  MemberId to;
  Message message;
};
struct Quiet {  // aborts the group and asks for Quieted; a main thread at rest reports again
  Ballot ballot;
};
struct FormGroup {  // forms the new group, restores
  Form form;
};
struct Installed {
  View view;
};
struct Ended {
  std::int32_t code = 0;
  std::string reason = {};
};
using Action = std::variant<Send, Quiet, FormGroup, Installed, Ended>;

// A member of the first view.
[[nodiscard]] Membership first_member(const Settings& settings, const View& view, MemberId self);
// A newcomer that a planned change tries to take in: `next` has it, and `before` are the views that
// count at the leader (views_that_count). It is a member once it hears Taken.
[[nodiscard]] Membership newcomer(const Settings& settings, const View& next, MemberId self,
                                  const std::vector<View>& before);
// The views that count at this member: any of them could be running or may yet be.
[[nodiscard]] std::vector<View> views_that_count(const Membership& membership);
// Whether a planned change to `next` may be tried, asked at the leader. Where somebody who was left
// out may be alive, nobody leaves without whom the rest has no quorum of that earlier view.
[[nodiscard]] bool may_try(const Membership& membership, const View& next);

// The only function that changes a Membership.
[[nodiscard]] std::vector<Action> handle(Membership& membership, const Event& event);

// The member that leads in the eyes of this one: the lowest of its views that is left.
[[nodiscard]] MemberId leader(const Membership& membership);

// Whether `forming` may form a view against `electorate`, whose members in `gone` do not count.
[[nodiscard]] bool has_quorum(const View& electorate, const std::vector<MemberId>& forming,
                              const std::vector<MemberId>& gone, const Rules& rules = {});

}  // namespace dynmo::elastic
