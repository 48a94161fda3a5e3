// SPDX-License-Identifier: Apache-2.0
#include "tests/elastic/known.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/digest.h"
#include "dynmo/core/rng.h"

namespace dynmo::elastic {
namespace {

// Appends numbers and messages to what a state is known by.
class StateBytes {
 public:
  template <typename T>
  void add(const T& value) requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) {
    const auto number = static_cast<std::int64_t>(value);
    text_.push_back(static_cast<char>(number & 0xff));
    if (number < 0 || number > 250) text_.append(reinterpret_cast<const char*>(&number), 8);
  }
  void add(MemberId id) { add(id.value); }
  void add(const Ballot& ballot) {
    add(ballot.number);
    add(ballot.proposer);
  }
  void add(const View& view) {
    add(view.generation);
    add(view.members.size());
    for (const Member& member : view.members) add(member.id);
  }
  template <typename T>
  void add(const std::vector<T>& all) {
    add(all.size());
    for (const T& one : all) add(one);
  }
  void add(const Member& member) { add(member.id); }
  void add(const Standing& standing) {
    add(standing.installed);
    add(standing.earlier);
    add(standing.attempts);
    add(standing.gone);
    add(standing.losses.step + 1);
    add(standing.losses.count);
  }
  void add_message(const Message& message) { text_ += *encode(message); }
  void add(const Membership& m) {
    add(m.self.id);
    add(m.phase);
    add(m.standing);
    add(m.seen);
    add(m.promised);
    add(m.silent);
    add(m.group_failed);
    add(m.report.has_value());
    if (m.report) add_message(Reported{m.promised, {}, *m.report});
    add(m.forming.has_value());
    if (m.forming) add_message(*m.forming);
    add(m.proposal.has_value());
    if (!m.proposal) return;
    add(m.proposal->ballot);
    add(m.proposal->stage);
    for (const Reported& reported : m.proposal->reports) add_message(reported);
    add(m.proposal->form.has_value());
    if (m.proposal->form) add_message(*m.proposal->form);
  }
  void add(const Event& event) {
    add(event.index());
    if (const auto* told = std::get_if<FateTold>(&event)) {
      add(told->member);
      add(told->fate);
    }
    if (const auto* quieted = std::get_if<Quieted>(&event)) {
      add_message(Reported{{}, {}, quieted->report});
    }
    if (const auto* failed = std::get_if<GroupFailed>(&event)) add(failed->generation);
    if (const auto* tries = std::get_if<Tries>(&event)) add(tries->next);
  }
  [[nodiscard]] std::uint64_t hash() const { return digest_of(text_).low; }

 private:
  std::string text_;
};

template <typename T>
std::uint64_t hash_of(const T& value) {
  StateBytes bytes;
  bytes.add(value);
  return bytes.hash();
}

}  // namespace

const Known* Memberships::known(Membership membership) {
  const MemberId lowest = leader(membership);
  if (keep_ == Keep::kEach) return &each_known_.emplace_back(Known{std::move(membership), lowest});
  if (keep_ == Keep::kOnceByMember && membership.proposal) {
    std::ranges::sort(membership.proposal->reports, {},
                      [](const Reported& one) { return one.report.member.id; });
  }
  const std::uint64_t hash = hash_of(membership);
  auto& place = memberships_[hash];
  if (place == nullptr) {
    place = std::make_unique<Known>(Known{std::move(membership), lowest, hash});
  }
  return place.get();
}

const Packet* Memberships::packet(const Message& message) {
  if (keep_ == Keep::kEach) return &each_packet_.emplace_back(Packet{message});
  StateBytes bytes;
  bytes.add_message(message);
  auto& place = packets_[bytes.hash()];
  if (place == nullptr) place = std::make_unique<Packet>(Packet{message, bytes.hash()});
  return place.get();
}

const Memberships::Outcome& Memberships::handled(const Known* known, const Event& event) {
  DYNMO_CHECK(!std::holds_alternative<Received>(event), "an event without a message");
  return handled({known, keep_ == Keep::kEach ? 0 : hash_of(event)}, event);
}

const Memberships::Outcome& Memberships::handled(const Known* known, MemberId from,
                                                 const Packet* packet) {
  const Key key{known, mix_key({packet->hash, from.value})};
  if (const auto found = outcomes_.find(key); found != outcomes_.end()) return found->second;
  return handled(key, Received{from, packet->message});
}

const Memberships::Outcome& Memberships::handled(const Key& key, const Event& event) {
  if (keep_ == Keep::kEach) return each_outcome_.emplace_back(outcome_of(key.known, event));
  if (const auto found = outcomes_.find(key); found != outcomes_.end()) return found->second;
  return outcomes_.emplace(key, outcome_of(key.known, event)).first->second;
}

Memberships::Outcome Memberships::outcome_of(const Known* before, const Event& event) {
  Membership next = before->membership;
  Outcome outcome;
  outcome.actions = handle(next, event);
  for (const Action& action : outcome.actions) {
    const auto* sent = std::get_if<Send>(&action);
    outcome.packets.push_back(sent == nullptr ? nullptr : packet(sent->message));
  }
  outcome.after = known(std::move(next));
  return outcome;
}

}  // namespace dynmo::elastic
