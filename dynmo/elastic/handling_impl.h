// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state machine at work on one event: membership.cpp has what every member does, proposal.cpp
// what a leader does.

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/elastic/quorum_impl.h"

namespace dynmo::elastic {

using Stage = Proposal::Stage;

inline constexpr std::int32_t kLeftOut = 5;  // the exit code of ranks that are lost

// One event at work: the membership, and what comes of it.
class Handling {
 public:
  explicit Handling(Membership& membership) : m_(membership) {}

  std::vector<Action> run(const Event& event) {
    std::visit([&](const auto& told) { on(told); }, event);
    while (!to_self_.empty()) {
      const Message message = std::move(to_self_.front());
      to_self_.pop_front();
      on(Received{m_.self.id, message});
    }
    return std::move(actions_);
  }

 private:
  // Events.
  void on(const Received& received) {
    from_ = received.from;
    if (m_.phase == Phase::kEnded) return;
    std::visit([&](const auto& message) { take(message); }, received.message);
  }
  void on(const FateTold& told);
  void on(const Quieted& quieted);
  void on(const Formed&);
  void on(const GroupFailed& failed);
  void on(const NumberTaken& taken) { m_.seen = std::max(m_.seen, taken.generation); }
  void on(const Tries& tries);
  void on(const Kept&);
  void on(const Taken&);
  void on(const Retry&);

  // Messages from `from_`.
  void take(const Notice& notice);
  void take(const Prepare& prepare);
  void take(const Refuse& refuse);
  void take(const Reported& reported);
  void take(const Form& form);
  void take(const Out& out);
  void take(const OutAcknowledged&);
  void take(const End& end);

  // The leader's actions.
  void propose();
  void collect();
  void decide();
  void form(const std::vector<Report>& staying, const Losses& losses);
  void end_all(const Error& why);
  void say_again(MemberId to);

  void answer_loss();
  // Tells who is in no newer view than this member that it is in this one's neither.
  void leave_out(MemberId whom) {
    if (m_.standing.installed.generation == 0 || in_any(participants(m_.standing, {}), whom))
      return;
    send(whom, Out{{.number = m_.standing.installed.generation, .proposer = m_.self.id}});
  }
  void report() { send(m_.promised.proposer, Reported{m_.promised, m_.standing, *m_.report}); }
  void end(int code, const std::string& reason) {
    m_.phase = Phase::kEnded;
    m_.proposal.reset();
    actions_.emplace_back(Ended{code, reason});
  }
  void send(MemberId to, Message message) {
    if (to == m_.self.id) {
      to_self_.push_back(std::move(message));
    } else {
      actions_.emplace_back(Send{to, std::move(message)});
    }
  }

  [[nodiscard]] bool is_gone(MemberId id) const { return has(m_.standing.gone, id); }
  [[nodiscard]] bool is_left(MemberId id) const { return !is_gone(id) && !has(m_.silent, id); }
  [[nodiscard]] bool all_left(const View& view) const {
    return std::all_of(view.members.begin(), view.members.end(),
                       [&](const Member& member) { return is_left(member.id); });
  }
  [[nodiscard]] std::vector<View> views_in_question() const {
    return electorates(m_.proposal->reports, m_.standing.gone, m_.settings.rules);
  }
  [[nodiscard]] bool takes_part(MemberId id) const {
    return in_any(participants(m_.standing, m_.proposal->reports), id);
  }
  [[nodiscard]] bool worried() const;
  [[nodiscard]] bool leads() const { return leader(m_) == m_.self.id; }
  [[nodiscard]] bool takes(const Form& form) const;
  // The view whose group this member computes in.
  [[nodiscard]] const View& in_force() const {
    const bool newcomer = m_.standing.installed.generation == 0 && !m_.standing.attempts.empty();
    return newcomer ? m_.standing.attempts.front() : m_.standing.installed;
  }
  void install(const View& view, const std::vector<View>& before);

  Membership& m_;
  MemberId from_;
  std::vector<Action> actions_;
  std::deque<Message> to_self_;
};

}  // namespace dynmo::elastic
