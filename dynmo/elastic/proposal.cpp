// SPDX-License-Identifier: Apache-2.0
// What a leader does with a ballot.
#include <algorithm>
#include <utility>

#include "dynmo/elastic/handling_impl.h"

namespace dynmo::elastic {

void Handling::propose(Why why, std::vector<MemberId> drop, std::vector<Member> add) {
  m_.seen = std::max(m_.seen, m_.promised.number) + 1;
  m_.proposal = Proposal{
      .prepare = {{m_.seen, m_.self.id}, why}, .drop = std::move(drop), .add = std::move(add)};
  for (const Member& member : participants(m_.standing, {})) say_again(member.id);
}

// What `to` has not answered of the proposal.
void Handling::say_again(MemberId to) {
  const Proposal& proposal = *m_.proposal;
  if (is_gone(to)) return;
  switch (proposal.stage) {
    case Stage::kCollecting:
      if (!find(proposal.reports, to)) send(to, proposal.prepare);
      return;
    case Stage::kReleasing:
      if (has(proposal.drop, to)) send(to, Out{proposal.prepare.ballot, 0});
      return;
    case Stage::kForming:
      if (proposal.form->view.has(to)) return send(to, *proposal.form);
      if (takes_part(to)) send(to, Out{proposal.prepare.ballot, kLeftOut});
  }
}

void Handling::collect() {
  for (const Member& member : participants(m_.standing, m_.proposal->reports)) {
    if (is_left(member.id) && !find(m_.proposal->reports, member.id)) return;
  }
  decide();
}

// Sends away who leaves as planned, and says whether all of them are gone, or silent. Whoever is
// needed stays: the change goes on without leaving.
bool Handling::release(const std::vector<Report>& all, const std::vector<MemberId>& leaving) {
  Proposal& proposal = *m_.proposal;
  if (proposal.stage == Stage::kCollecting) {
    std::vector<Report> staying = all;
    std::erase_if(staying, [&](const Report& one) { return has(leaving, one.member.id); });
    std::vector<MemberId> gone = m_.standing.gone;
    for (const MemberId id : leaving) insert(gone, id);
    const auto with = recover(m_.settings.model, all);
    const auto without = recover(m_.settings.model, staying);
    const bool missed =
        !without || !with || without->step != with->step ||
        std::ssize(staying) < m_.settings.ranks_min ||
        !quorum_of_all(views_in_question(), ids_of(staying), gone, m_.settings.rules);
    if (missed) {
      proposal.drop.clear();
      return true;
    }
    proposal.stage = Stage::kReleasing;
    for (const MemberId id : leaving) {
      if (id == m_.self.id) continue;
      say_again(id);
      if (!m_.settings.rules.acknowledged) insert(m_.standing.gone, id);
    }
  }
  return std::none_of(leaving.begin(), leaving.end(),
                      [&](MemberId id) { return id != m_.self.id && is_left(id); });
}

void Handling::decide() {
  Proposal& proposal = *m_.proposal;
  std::vector<Report> staying;
  std::vector<MemberId> leaving;
  for (const Reported& one : proposal.reports) {
    if (!is_left(one.report.member.id)) continue;
    staying.push_back(one.report);
    if (has(proposal.drop, one.report.member.id)) leaving.push_back(one.report.member.id);
  }
  if (!leaving.empty() && !release(staying, leaving)) return;
  std::erase_if(staying, [&](const Report& one) { return has(proposal.drop, one.member.id); });
  const bool self_leaves = has(proposal.drop, m_.self.id);
  std::vector<MemberId> gone = m_.standing.gone;
  if (self_leaves) insert(gone, m_.self.id);
  if (!quorum_of_all(views_in_question(), ids_of(staying), gone, m_.settings.rules)) {
    return end_all(make_error(ErrorCode::kPeerLost,
                              "{} ranks are left that cannot know that no others go on: fewer than "
                              "half of those that may be alive",
                              staying.size()));
  }
  if (std::ssize(staying) + std::ssize(proposal.add) < m_.settings.ranks_min) {
    return end_all(make_error(ErrorCode::kInfeasible, "{} ranks are left, elastic.ranks_min is {}",
                              staying.size(), m_.settings.ranks_min));
  }
  Losses losses = newest(proposal.reports).standing.losses;
  if (proposal.prepare.why == Why::kLoss) losses = one_more(losses, staying);
  if (losses.count > m_.settings.losses_max) {
    return end_all(make_error(ErrorCode::kPeerLost, "{} losses one after another in step {}",
                              losses.count, losses.step));
  }
  std::size_t tried = 0;
  for (const Reported& one : proposal.reports) {
    tried = std::max(tried, one.standing.attempts.size());
  }
  const int tries = static_cast<int>(tried) + 1;
  if (tries > m_.settings.attempts_max) {
    return end_all(make_error(ErrorCode::kPeerLost,
                              "{} tries to form a group failed one after another, the last of {} "
                              "ranks; can all of them reach each other?",
                              tries, staying.size()));
  }
  form(std::move(staying), losses, self_leaves);
}

void Handling::form(std::vector<Report> staying, const Losses& losses, bool self_leaves) {
  Proposal& proposal = *m_.proposal;
  const auto decision = recover(m_.settings.model, staying);
  if (!decision) return end_all(decision.error());
  Form form{.ballot = proposal.prepare.ballot,
            .view = {.generation = proposal.prepare.ballot.number},
            .before = views_in_question(),
            .gone = m_.standing.gone,
            .losses = losses,
            .decision = *decision,
            .note = m_.note};
  for (const Report& one : staying) form.view.members.push_back(one.member);
  for (const Member& member : proposal.add) {
    const bool reported = form.view.has(member.id);
    if (is_left(member.id) && !reported) form.view.members.push_back(member);
  }
  sort(form.view.members);
  if (self_leaves) insert(form.gone, m_.self.id);
  proposal.form = std::move(form);
  proposal.stage = Stage::kForming;
  for (const Member& member : proposal.form->view.members) say_again(member.id);
  if (self_leaves) end(0, "released");
}

void Handling::end_all(const Error& why) {
  const End ending{m_.proposal->prepare.ballot, exit_code(why.code), why.message};
  for (const Reported& one : m_.proposal->reports) send(one.report.member.id, ending);
}

}  // namespace dynmo::elastic
