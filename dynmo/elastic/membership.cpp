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
    Standing& mine = m_.standing;
    insert(mine.gone, id);
    if (mine.installed.generation > 0)
      mine.earlier = open_ends(mine.earlier, mine.installed, mine.gone);
  }
  if (!m_.proposal) {
    if (told.fate == Fate::kAlive && id == leader(m_)) send(id, Notice{m_.promised, false});
    return on(Retry{});
  }
  if (!takes_part(id) && !m_.proposal->form) return;
  if (told.fate == Fate::kAlive) return say_again(id);
  switch (m_.proposal->stage) {
    case Stage::kCollecting:
      return collect();
    case Stage::kForming:
      if (m_.proposal->form->view.has(id)) propose();
  }
}

void Handling::on(const Quieted& quieted) {
  if (m_.phase != Phase::kQuiet) return;
  m_.phase = Phase::kReported;
  m_.report = quieted.report;
  report();
}

void Handling::on(const Formed&) {
  if (m_.phase != Phase::kForming) return;
  m_.standing.losses = m_.forming->losses;
  const Form form = *std::exchange(m_.forming, std::nullopt);
  m_.proposal.reset();
  m_.phase = Phase::kRun;
  install(form.view, form.before);
}

void Handling::install(const View& view, const std::vector<View>& before) {
  Standing& mine = m_.standing;
  mine.installed = view;
  mine.attempts.clear();
  mine.earlier =
      m_.settings.rules.open_ends ? open_ends(before, view, mine.gone) : std::vector<View>();
  std::erase_if(mine.gone,
                [&](MemberId id) { return !mine.installed.has(id) && !in_any(mine.earlier, id); });
  actions_.emplace_back(Installed{mine.installed});
  on(Retry{});
}

void Handling::on(const Tries& tries) {
  DYNMO_CHECK(m_.phase == Phase::kRun && tries.next.generation > m_.promised.number,
              "a try of generation {} in a run that is well, got phase {} and ballot {}",
              tries.next.generation, static_cast<int>(m_.phase), m_.promised.number);
  m_.seen = std::max(m_.seen, tries.next.generation);
  m_.standing.attempts.push_back(tries.next);
}

// Safe to forget: the members gather their votes, so all of them see the same no.
void Handling::on(const Kept&) {
  if (m_.phase == Phase::kRun && !m_.standing.attempts.empty()) m_.standing.attempts.pop_back();
}

void Handling::on(const Taken&) {
  if (m_.phase != Phase::kRun || m_.standing.attempts.empty()) return;
  const View next = m_.standing.attempts.back();
  if (!next.has(m_.self.id)) return end(0, "released");
  std::vector<View> before = views_that_count(m_);
  std::erase(before, next);
  m_.promised = {.number = next.generation};
  install(next, before);
}

void Handling::on(const GroupFailed& failed) {
  const bool runs = (m_.phase == Phase::kRun || m_.phase == Phase::kQuiet) &&
                    in_force().generation == failed.generation;
  const bool forms =
      m_.phase == Phase::kForming && m_.forming->view.generation == failed.generation;
  m_.group_failed = m_.group_failed || runs || forms;
  if (runs || forms) answer_loss();
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
      return !all_left(in_force());
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
    if (!m_.proposal || m_.proposal->stage != Stage::kCollecting) propose();
  } else if (lowest != MemberId{}) {
    send(lowest, Notice{m_.promised, m_.phase != Phase::kReported});
  }
}

void Handling::take(const Notice& notice) {
  m_.seen = std::max(m_.seen, notice.promised.number);
  if (!in_any(participants(m_.standing, {}), from_)) return leave_out(from_);
  if (!leads()) return;
  if (m_.proposal) {
    const bool failed = notice.in_trouble && notice.promised == m_.proposal->ballot &&
                        m_.proposal->stage == Stage::kForming;
    return failed ? propose() : say_again(from_);
  }
  // Behind is who has not heard yet that a planned change is taken; it may never hear of it.
  const bool behind = notice.promised.number < m_.promised.number;
  const bool well =
      m_.phase == Phase::kRun && !notice.in_trouble && (behind || notice.promised == m_.promised);
  if (!well) propose();
}

void Handling::take(const Prepare& prepare) {
  m_.seen = std::max(m_.seen, prepare.ballot.number);
  const std::vector<Member> known = participants(m_.standing, {});
  if (!in_any(known, from_)) return leave_out(from_);
  // Two that cannot reach each other would outbid each other for ever; all others follow the
  // lower one.
  const MemberId lowest = leader(m_);
  const bool from_lowest = lowest == from_ || number_of(known, from_) < number_of(known, lowest);
  if (!from_lowest) {
    if (lowest == m_.self.id && !m_.proposal) propose();
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
  // A main thread that is at rest already reports again what it holds: there may be a newer
  // checkpoint.
  m_.phase = Phase::kQuiet;
  m_.group_failed = false;
  m_.forming.reset();
  actions_.emplace_back(Quiet{prepare.ballot});
}

void Handling::take(const Refuse& refuse) {
  m_.seen = std::max(m_.seen, refuse.seen);
  if (!m_.proposal || m_.proposal->ballot != refuse.ballot) return;
  if (leads()) {
    propose();
  } else {
    m_.proposal.reset();
    answer_loss();
  }
}

void Handling::take(const Reported& reported) {
  if (reported.report.member.id != from_) return;
  if (!m_.proposal || m_.proposal->ballot != reported.ballot) {
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
  if (!m_.settings.rules.promises) return form.ballot.number > m_.standing.installed.generation;
  return m_.phase == Phase::kReported && form.ballot == m_.promised;
}

void Handling::take(const Form& form) {
  m_.seen = std::max(m_.seen, form.ballot.number);
  const bool again =
      form.ballot == m_.promised && (m_.phase == Phase::kForming || m_.phase == Phase::kRun);
  if (again) return;
  if (!takes(form)) return send(from_, Refuse{form.ballot, m_.seen});
  m_.standing.attempts.push_back(form.view);
  for (const MemberId id : form.gone) insert(m_.standing.gone, id);
  m_.forming = form;
  m_.report.reset();
  m_.phase = Phase::kForming;
  actions_.emplace_back(FormGroup{form});
}

void Handling::take(const Out& out) {
  Generation base = m_.standing.installed.generation;
  for (const View& view : m_.standing.earlier) base = std::max(base, view.generation);
  // A newcomer whose try failed has nothing to lose, and nobody may know of its view but the dead.
  const bool tried =
      m_.standing.installed.generation == 0 && (m_.phase != Phase::kForming || m_.group_failed);
  if (out.ballot.number <= base && !tried) return send(from_, Refuse{out.ballot, m_.seen});
  send(from_, OutAcknowledged{out.ballot});
  end(kLeftOut, "the others went on without this rank");
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
          .standing = {.installed = view},
          .seen = view.generation,
          .promised = {.number = view.generation}};
}

Membership newcomer(const Settings& settings, const View& next, MemberId self,
                    const std::vector<View>& before) {
  Membership made = first_member(settings, next, self);
  made.standing = {.earlier = before, .attempts = {next}};
  made.promised = {};
  return made;
}

std::vector<View> views_that_count(const Membership& membership) {
  return electorates({{{}, membership.standing, {}}}, membership.standing.gone,
                     membership.settings.rules);
}

bool may_try(const Membership& membership, const View& next) {
  const Standing& mine = membership.standing;
  const Rules& rules = membership.settings.rules;
  if (mine.earlier.empty()) return true;
  std::vector<MemberId> staying;
  std::vector<MemberId> gone = mine.gone;
  for (const Member& member : next.members) insert(staying, member.id);
  for (const Member& member : mine.installed.members) {
    if (!next.has(member.id)) insert(gone, member.id);
  }
  return quorum_of_all(mine.earlier, staying, gone, rules) || !rules.releases;
}

std::vector<Action> handle(Membership& membership, const Event& event) {
  return Handling(membership).run(event);
}

}  // namespace dynmo::elastic
