// SPDX-License-Identifier: Apache-2.0
// What a leader does with a ballot.
#include <algorithm>
#include <utility>

#include "dynmo/elastic/handling_impl.h"

namespace dynmo::elastic {

void Handling::propose() {
  m_.seen = std::max(m_.seen, m_.promised.number) + 1;
  m_.proposal = Proposal{.ballot = {m_.seen, m_.self.id}};
  for (const Member& member : participants(m_.standing, {})) say_again(member.id);
}

// Repeats the parts of the proposal that `to` has not answered.
void Handling::say_again(MemberId to) {
  const Proposal& proposal = *m_.proposal;
  if (is_gone(to)) return;
  switch (proposal.stage) {
    case Stage::kCollecting:
      if (!find(proposal.reports, to)) send(to, Prepare{proposal.ballot});
      return;
    case Stage::kForming:
      if (proposal.form->view.has(to)) return send(to, *proposal.form);
      if (takes_part(to)) send(to, Out{proposal.ballot});
  }
}

void Handling::collect() {
  for (const Member& member : participants(m_.standing, m_.proposal->reports)) {
    if (is_left(member.id) && !find(m_.proposal->reports, member.id)) return;
  }
  decide();
}

void Handling::decide() {
  Proposal& proposal = *m_.proposal;
  std::vector<Report> staying;
  for (const Reported& one : proposal.reports) {
    if (is_left(one.report.member.id)) staying.push_back(one.report);
  }
  if (!quorum_of_all(views_in_question(), ids_of(staying), m_.standing.gone, m_.settings.rules)) {
    return end_all(make_error(ErrorCode::kPeerLost,
                              "{} ranks are left that cannot know that no others go on: fewer than "
                              "half of those that may be alive",
                              staying.size()));
  }
  if (std::ssize(staying) < m_.settings.ranks_min) {
    return end_all(make_error(ErrorCode::kInfeasible, "{} ranks are left, elastic.ranks_min is {}",
                              staying.size(), m_.settings.ranks_min));
  }
  const Losses losses = one_more(newest(proposal.reports).standing.losses, staying);
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
  form(staying, losses);
}

void Handling::form(const std::vector<Report>& staying, const Losses& losses) {
  Proposal& proposal = *m_.proposal;
  const auto decision = recover(m_.settings.model, staying);
  if (!decision) return end_all(decision.error());
  Form form{.ballot = proposal.ballot,
            .view = {.generation = proposal.ballot.number},
            .before = views_in_question(),
            .gone = m_.standing.gone,
            .losses = losses,
            .decision = *decision};
  for (const Report& one : staying) form.view.members.push_back(one.member);
  sort(form.view.members);
  proposal.form = std::move(form);
  proposal.stage = Stage::kForming;
  for (const Member& member : proposal.form->view.members) say_again(member.id);
}

void Handling::end_all(const Error& why) {
  const End ending{m_.proposal->ballot, exit_code(why.code), why.message};
  for (const Reported& one : m_.proposal->reports) send(one.report.member.id, ending);
}

}  // namespace dynmo::elastic
