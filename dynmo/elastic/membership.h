// SPDX-License-Identifier: Apache-2.0
#pragma once

// How members agree on who goes on, when some leave, come, or are lost: a state machine without
// sockets, threads or a clock. Its driver turns connections and time into events and does what the
// actions say; the same machine runs in tests/elastic, which try all orders of events.
//
// A change of the view is one ballot. The leader, which is the lowest member that is left, asks
// all to prepare; each promises to follow no older ballot, brings its main thread to rest and
// reports; the leader decides and asks all that stay to form; they note that they try, form a
// group, bring the layers in place, and install the view once all have done so. After any loss on
// the way the lowest that is left begins the next ballot.
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

enum class Fate : std::uint8_t {
  kAlive,
  kSilent,  // for longer than the limit: it may be alive
  kDead,    // for certain, and for ever
};

// All hold in a run. The explorer takes one away to see that it is needed.
struct Rules {
  bool attempts = true;      // a quorum is wanted of views that were tried, too
  bool acknowledged = true;  // who is left out is gone when it has said so, not when it was told
  bool ties = true;          // half is enough only with the lowest
  bool promises = true;      // who has reported to a ballot takes part in no older one
  bool open_ends = true;     // views before the last count as long as members of them may be alive
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

enum class Phase : std::uint8_t { kStandby, kRun, kQuiet, kReported, kForming, kEnded };

// What a leader is about.
struct Proposal {
  enum class Stage : std::uint8_t { kCollecting, kReleasing, kForming };
  Prepare prepare;
  Stage stage = Stage::kCollecting;
  std::vector<MemberId> drop = {};
  std::vector<Member> add = {};
  std::vector<Reported> reports = {};
  std::optional<Form> form = {};
};

// One member's state; the leader's has a proposal. A value: copying it forks the machine.
struct Membership {
  Settings settings = {};
  Member self = {};
  Phase phase = Phase::kStandby;
  Standing standing = {};
  Generation seen = 0;  // the highest number of any ballot, view or plan
  Ballot promised = {};
  std::vector<MemberId> silent = {};  // ascending
  std::vector<Member> standbys = {};  // that have asked this member
  std::optional<Report> report = {};  // of a main thread at rest
  std::string note = {};              // for Form::note
  Why quiet_for = Why::kLoss;         // of kQuiet
  std::optional<Form> forming = {};
  bool group_failed = false;  // and nobody has asked to prepare since
  std::optional<Proposal> proposal = {};
};

// What the driver tells.
struct Received {
  MemberId from;
  Message message;
};
// By the connection, the pidfd, a fence or the cluster. A connection that was lost and is made anew
// is told as kAlive at both ends, after which each says again what the other may have missed.
struct FateTold {
  MemberId member;
  Fate fate = Fate::kAlive;
};
struct Quieted {  // the main thread is at rest, as Quiet asked for
  Report report;
  std::string note = {};
};
struct Formed {};     // the digests of all members of `forming` agree
struct GroupFailed {  // the group of this generation, installed or forming
  Generation generation = 0;
};
struct NumberTaken {  // by a plan
  Generation generation = 0;
};
struct Change {  // wanted at the leader, between two steps; ignored elsewhere
  std::vector<MemberId> drop = {};
  std::vector<MemberId> add = {};  // standbys
};
struct JoinThrough {  // a standby asks a member that it has found
  MemberId contact;
};
struct Retry {};  // now and then: what is not answered is said again
using Event = std::variant<Received, FateTold, Quieted, Formed, GroupFailed, NumberTaken, Change,
                           JoinThrough, Retry>;

// What the driver does. A message that cannot be sent is told as a fate.
struct Send {
  MemberId to;
  Message message;
};
// Asks for Quieted. Planned: ends the step and keeps the group until FormGroup; loss: aborts it.
// A main thread that is at rest reports again.
struct Quiet {
  Ballot ballot;
  Why why = Why::kLoss;
};
struct FormGroup {  // closes the old group, forms the new one, restores
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

// A member of the first view, and a process that will ask to join.
[[nodiscard]] Membership first_member(const Settings& settings, const View& view, MemberId self);
[[nodiscard]] Membership standby(const Settings& settings, const Member& self);

// The only function that changes a Membership.
[[nodiscard]] std::vector<Action> handle(Membership& membership, const Event& event);

// The member that leads in the eyes of this one: the lowest of its views that is left.
[[nodiscard]] MemberId leader(const Membership& membership);

// Whether `forming` may form a view against `electorate`, of which those in `gone` do not count.
[[nodiscard]] bool has_quorum(const View& electorate, const std::vector<MemberId>& forming,
                              const std::vector<MemberId>& gone, const Rules& rules = {});

}  // namespace dynmo::elastic
