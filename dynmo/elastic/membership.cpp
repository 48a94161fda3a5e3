// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/membership.h"

#include <algorithm>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/elastic/handling_impl.h"

namespace dynmo::elastic {

void Handling::on(const FateTold& told) {
  const MemberId id = told.member;
  if (id == m_.self.id || m_.phase == Phase::kEnded || is_gone(id)) return;
  erase(m_.silent, id);
  if (told.fate == Fate::kSilent) insert(m_.silent, id);
  if (told.fate == Fate::kDead) {
    insert(m_.standing.gone, id);
    std::erase_if(m_.standbys, [&](const Member& member) { return member.id == id; });
  }
  if (m_.phase == Phase::kStandby) return;
  if (!m_.proposal) {
    if (told.fate == Fate::kAlive && id == leader(m_)) send(id, Notice{m_.promised, false});
    return on(Retry{});
  }
  if (!takes_part(id) && !m_.proposal->form) return;
  if (told.fate == Fate::kAlive) return say_again(id);
  switch (m_.proposal->stage) {
    case Stage::kCollecting:
      return is_planned() ? propose(Why::kLoss) : collect();
    case Stage::kReleasing:
      if (has(m_.proposal->drop, id)) return decide();
      if (!find(m_.proposal->reports, id)) return;
      return propose(Why::kLoss);
    case Stage::kForming:
      if (m_.proposal->form->view.has(id)) propose(Why::kLoss);
  }
}

void Handling::on(const Quieted& quieted) {
  if (m_.phase != Phase::kQuiet) return;
  m_.phase = Phase::kReported;
  m_.report = quieted.report;
  m_.note = quieted.note;
  report();
}

void Handling::on(const Formed&) {
  if (m_.phase != Phase::kForming) return;
  Standing& mine = m_.standing;
  mine.installed = m_.forming->view;
  mine.losses = m_.forming->losses;
  mine.attempts.clear();
  mine.earlier = m_.settings.rules.open_ends
                     ? open_ends(m_.forming->before, mine.installed, mine.gone)
                     : std::vector<View>();
  std::erase_if(mine.gone,
                [&](MemberId id) { return !mine.installed.has(id) && !in_any(mine.earlier, id); });
  std::erase_if(m_.standbys, [&](const Member& member) { return mine.installed.has(member.id); });
  m_.forming.reset();
  m_.proposal.reset();
  m_.phase = Phase::kRun;
  actions_.emplace_back(Installed{mine.installed});
  on(Retry{});
}

void Handling::on(const GroupFailed& failed) {
  const bool runs = (m_.phase == Phase::kRun || m_.phase == Phase::kQuiet) &&
                    m_.standing.installed.generation == failed.generation;
  const bool forms =
      m_.phase == Phase::kForming && m_.forming->view.generation == failed.generation;
  m_.group_failed = m_.group_failed || runs || forms;
  if (runs || forms) answer_loss();
}

void Handling::on(const Change& change) {
  if (m_.phase != Phase::kRun || m_.proposal || !leads()) return;
  std::vector<Member> add;
  for (const Member& member : m_.standbys) {
    if (has(change.add, member.id)) add.push_back(member);
  }
  std::vector<MemberId> drop;
  for (const Member& member : m_.standing.installed.members) {
    if (has(change.drop, member.id)) insert(drop, member.id);
  }
  if (!drop.empty() || !add.empty()) propose(Why::kPlanned, std::move(drop), std::move(add));
}

void Handling::on(const Retry&) {
  if (m_.proposal) {
    for (const Member& member : participants(m_.standing, m_.proposal->reports)) {
      if (member.id != m_.self.id) say_again(member.id);
    }
    return;
  }
  if (m_.group_failed || m_.phase == Phase::kReported || worried()) answer_loss();
}

// Somebody is missing without whom nothing goes on.
bool Handling::worried() const {
  switch (m_.phase) {
    case Phase::kRun:
      return !all_left(m_.standing.installed);
    case Phase::kForming:
      return !all_left(m_.forming->view);
    case Phase::kQuiet:
      return !is_left(m_.promised.proposer);
    default:
      return false;
  }
}

// The leader proposes; others tell it.
void Handling::answer_loss() {
  const MemberId lowest = leader(m_);
  if (lowest == m_.self.id) {
    const bool collects = m_.proposal && m_.proposal->stage == Stage::kCollecting;
    if (!collects || is_planned()) propose(Why::kLoss);
  } else if (lowest != MemberId{}) {
    send(lowest, Notice{m_.promised, m_.phase != Phase::kReported});
  }
}

void Handling::take(const Join& join) {
  const MemberId lowest = leader(m_);
  if (lowest != m_.self.id) {
    if (lowest != MemberId{} && lowest != from_) send(lowest, join);
    return;
  }
  if (is_gone(join.member.id)) return;
  const bool known =
      std::find(m_.standbys.begin(), m_.standbys.end(), join.member) != m_.standbys.end();
  if (!known && !m_.standing.installed.has(join.member.id)) m_.standbys.push_back(join.member);
}

void Handling::take(const Notice& notice) {
  m_.seen = std::max(m_.seen, notice.promised.number);
  if (!in_any(participants(m_.standing, {}), from_)) return leave_out(from_);
  if (!leads()) return;
  if (m_.proposal) {
    const bool failed = notice.in_trouble && notice.promised == m_.proposal->prepare.ballot &&
                        (m_.proposal->stage == Stage::kForming || is_planned());
    return failed ? propose(Why::kLoss) : say_again(from_);
  }
  const bool behind = m_.phase == Phase::kRun && notice.promised.number < m_.promised.number;
  const bool well = m_.phase == Phase::kRun && notice.promised == m_.promised && !notice.in_trouble;
  if (!behind && !well) propose(Why::kLoss);
}

void Handling::take(const Prepare& prepare) {
  m_.seen = std::max(m_.seen, prepare.ballot.number);
  // A try to form a view with this standby is known to others, and not to it.
  if (m_.phase == Phase::kStandby && prepare.ballot.number >= m_.promised.number) {
    m_.promised = prepare.ballot;
    return send(from_, Reported{prepare.ballot, m_.standing, {.member = m_.self}});
  }
  const std::vector<Member> known = participants(m_.standing, {});
  if (!in_any(known, from_)) return leave_out(from_);
  // Two that cannot reach each other would outbid each other for ever; all others follow the
  // lower one.
  const MemberId lowest = leader(m_);
  const bool from_lowest = lowest == from_ || number_of(known, from_) < number_of(known, lowest);
  if (!from_lowest) {
    if (lowest == m_.self.id && !m_.proposal) propose(Why::kLoss);
    return;
  }
  if (prepare.ballot == m_.promised) {
    if (m_.phase == Phase::kReported) report();
    return;
  }
  if (prepare.ballot.number <= m_.promised.number) {
    return send(from_, Refuse{prepare.ballot, m_.seen});
  }
  m_.promised = prepare.ballot;
  if (from_ != m_.self.id) m_.proposal.reset();
  // A group that is given up, or not there yet, is not kept for a planned change. A main thread
  // that is at rest already says again what it holds: there may be a newer checkpoint.
  const bool keeps =
      m_.phase == Phase::kRun || (m_.phase != Phase::kForming && m_.quiet_for == Why::kPlanned);
  m_.quiet_for = keeps ? prepare.why : Why::kLoss;
  m_.phase = Phase::kQuiet;
  m_.group_failed = false;
  m_.forming.reset();
  actions_.emplace_back(Quiet{prepare.ballot, m_.quiet_for});
}

void Handling::take(const Refuse& refuse) {
  m_.seen = std::max(m_.seen, refuse.seen);
  if (!m_.proposal || m_.proposal->prepare.ballot != refuse.ballot) return;
  if (leads()) {
    propose(m_.proposal->prepare.why, m_.proposal->drop, m_.proposal->add);
  } else {
    m_.proposal.reset();
    answer_loss();
  }
}

void Handling::take(const Reported& reported) {
  if (reported.report.member.id != from_) return;
  if (!m_.proposal || m_.proposal->prepare.ballot != reported.ballot) {
    return leave_out(from_);
  }
  if (m_.proposal->stage != Stage::kCollecting) {
    if (!find(m_.proposal->reports, from_)) say_again(from_);
    return;
  }
  if (find(m_.proposal->reports, from_)) return;
  const std::vector<Member> before = participants(m_.standing, m_.proposal->reports);
  m_.proposal->reports.push_back(reported);
  for (const MemberId id : reported.standing.gone) insert(m_.standing.gone, id);
  for (const Member& member : participants(m_.standing, m_.proposal->reports)) {
    if (!in_any(before, member.id)) say_again(member.id);
  }
  collect();
}

// Whether this member takes part in forming that view.
bool Handling::takes(const Form& form) const {
  if (!form.view.has(m_.self.id)) return false;
  if (m_.phase == Phase::kStandby) return form.ballot.number >= m_.promised.number;
  if (!m_.settings.rules.promises) return form.ballot.number > m_.standing.installed.generation;
  return m_.phase == Phase::kReported && form.ballot == m_.promised;
}

void Handling::take(const Form& form) {
  m_.seen = std::max(m_.seen, form.ballot.number);
  const bool again =
      form.ballot == m_.promised && (m_.phase == Phase::kForming || m_.phase == Phase::kRun);
  if (again) return;
  if (!takes(form)) return send(from_, Refuse{form.ballot, m_.seen});
  if (m_.phase == Phase::kStandby) {
    m_.promised = form.ballot;
    m_.standing.earlier = form.before;
  }
  m_.standing.attempts.push_back(form.view);
  for (const MemberId id : form.gone) insert(m_.standing.gone, id);
  m_.forming = form;
  m_.report.reset();
  m_.phase = Phase::kForming;
  actions_.emplace_back(FormGroup{form});
}

void Handling::take(const Out& out) {
  const bool released = out.code == 0 && out.ballot == m_.promised;
  Generation base = m_.standing.installed.generation;
  for (const View& view : m_.standing.earlier) base = std::max(base, view.generation);
  // A joiner whose try failed has nothing to lose, and nobody may know of its view but the dead.
  const bool tried =
      m_.standing.installed.generation == 0 && (m_.phase != Phase::kForming || m_.group_failed);
  const bool left_out = out.code != 0 && (out.ballot.number > base || tried);
  if (!released && !left_out) return send(from_, Refuse{out.ballot, m_.seen});
  send(from_, OutAcknowledged{out.ballot});
  end(out.code, out.code == 0 ? "released" : "the others went on without this rank");
}

void Handling::take(const OutAcknowledged&) { on(FateTold{from_, Fate::kDead}); }

void Handling::take(const End& ending) {
  if (ending.ballot == m_.promised) end(ending.code, ending.reason);
}

Membership first_member(const Settings& settings, const View& view, MemberId self) {
  const Member* member = view.find(self);
  DYNMO_CHECK(member != nullptr && view.generation > 0,
              "a member of a view, got {} of generation {}", self.value, view.generation);
  return {.settings = settings,
          .self = *member,
          .phase = Phase::kRun,
          .standing = {.installed = view},
          .seen = view.generation,
          .promised = {.number = view.generation}};
}

Membership standby(const Settings& settings, const Member& self) {
  return {.settings = settings, .self = self};
}

std::vector<Action> handle(Membership& membership, const Event& event) {
  return Handling(membership).run(event);
}

}  // namespace dynmo::elastic
