// SPDX-License-Identifier: Apache-2.0
// The members and the network of a world; world_group.cpp has what they compute and hold,
// world_hash.cpp what tells two worlds apart.
#include "tests/elastic/world.h"

#include <fmt/format.h>

#include <algorithm>

namespace dynmo::elastic {
namespace {

constexpr std::array<const char*, 25> kKindNames = {
    "deliver",    "tell",       "reconnect",  "rest",   "restore", "commit", "complete",
    "update",     "copy moved", "apply move", "arrive", "vote",    "hear",   "take",
    "checkpoint", "change",     "refuse",     "fail",   "crash",   "stop",   "wake",
    "cut",        "cut link",   "heal",       "retry"};

MemberId id_of(int node) { return {.value = static_cast<std::uint64_t>(node) + 1}; }

Member member_of(int node) { return {.id = id_of(node), .number = node}; }

}  // namespace

std::string to_string(const Happening& happening) {
  return fmt::format("{} {} {}", kKindNames[static_cast<std::size_t>(happening.kind)], happening.a,
                     happening.b);
}

World::World(const WorldOptions& options)
    : options_(options),
      memberships_(std::make_shared<Memberships>(options.reduced ? Memberships::Keep::kOnceByMember
                                                 : options.at_once ? Memberships::Keep::kOnce
                                                                   : Memberships::Keep::kEach)) {
  View view{.generation = 1};
  for (int i = 0; i < options.members; ++i) view.members.push_back(member_of(i));
  const Settings settings{.model = {.layers = options.layers}, .rules = options.rules};
  for (int i = 0; i < options.members + options.newcomers; ++i) {
    Node& made = *nodes_.emplace_back(std::make_shared<Node>());
    if (i >= options.members) {
      made.known =
          memberships_->known({.settings = settings, .self = member_of(i), .phase = Phase::kEnded});
      made.up = false;
      continue;
    }
    made.known = memberships_->known(first_member(settings, view, id_of(i)));
    made.main = Node::Main::kRunning;
    made.group = 1;
    for (int layer = 0; layer < options.layers; ++layer) {
      const bool mine = options.replicas || layer * options.members / options.layers == i;
      if (mine) made.copies.push_back({.layer = static_cast<std::int8_t>(layer)});
    }
  }
}

Node& World::edit(int a) {
  auto& place = nodes_[idx(a)];
  if (place.use_count() > 1) place = std::make_shared<Node>(*place);
  place->hash = 0;
  return *place;
}

void World::violate(const std::string& what) {
  if (violation_.empty()) violation_ = what;
}

bool World::reach(int a, int b) const { return a == b || link(a, b) == Link::kUp; }

Fate World::fate(int a, int b) const {
  if (link(a, b) != Link::kUp) return Fate::kSilent;
  if (!node(b).up) return Fate::kDead;
  return node(b).stopped ? Fate::kSilent : Fate::kAlive;
}

// A leader has a connection to everybody, the others to the one they follow.
bool World::cares(int a, int b, MemberId lowest) const {
  const Membership& m = node(a).membership();
  if (b < 0) {
    for (int other = 0; other < size(); ++other) {
      if (other != a && cares(a, other, lowest)) return true;
    }
    return false;
  }
  if (!is_born(b)) return false;
  if (node(a).told[idx(b)] == Fate::kSilent) return true;
  if (lowest == id_of(a)) {
    const auto has_it = [&](const View& view) { return view.has(id_of(b)); };
    return m.proposal.has_value() || has_it(m.standing.installed) ||
           std::ranges::any_of(m.standing.attempts, has_it) ||
           std::ranges::any_of(m.standing.earlier, has_it);
  }
  return lowest == id_of(b) || m.promised.proposer == id_of(b);
}

const Packet* World::first(int from, int to) const {
  for (const InFlight& one : flight_) {
    if (one.from == from && one.to == to) return one.packet;
  }
  return nullptr;
}

void World::forget(int from, int to) {
  std::erase_if(flight_, [&](const InFlight& one) { return one.from == from && one.to == to; });
}

void World::break_link(int a, int b) {
  if (link(a, b) == Link::kCut) set_link(a, b, Link::kBroken);
  forget(a, b);
  forget(b, a);
}

// Nobody receives what is on its way to a member that is down, and nobody looks at it.
void World::goes_down(int a) {
  edit(a).up = false;
  if (options_.reduced) std::erase_if(flight_, [&](const InFlight& one) { return one.to == a; });
}

void World::send(int a, MemberId to, const Packet* packet) {
  const int b = node_of(to);
  if (!node(b).up) {  // told again where it was forgotten
    const auto& gone = node(a).membership().standing.gone;
    if (std::find(gone.begin(), gone.end(), to) == gone.end()) edit(a).told[idx(b)] = Fate::kAlive;
    return;
  }
  if (link(a, b) == Link::kBroken || link(a, b) == Link::kMended) return;
  if (options_.at_once) {
    for (const InFlight& one : flight_) {
      if (one.from == a && one.to == b && one.packet == packet) return;
    }
  }
  flight_.push_back({static_cast<std::int8_t>(a), static_cast<std::int8_t>(b), packet});
}

void World::perform(int a, const Action& action, const Packet* packet) {
  if (const auto* sent = std::get_if<Send>(&action)) {
    if (const auto* form = std::get_if<Form>(&sent->message)) check_decision(a, *form);
    return send(a, sent->to, packet);
  }
  if (std::holds_alternative<Quiet>(action)) {
    Node& mine = edit(a);
    mine.group = 0;
    if (!options_.keep_shadows && !mine.applied) {
      std::erase_if(mine.copies, [](const Copy& copy) { return copy.kind == CopyKind::kShadow; });
    }
    mine.main = Node::Main::kStopping;
  }
  if (const auto* form = std::get_if<FormGroup>(&action)) {
    check_decision(a, form->form);
    Node& mine = edit(a);
    mine.main = Node::Main::kRestoring;
    mine.group = 0;
  }
  if (std::holds_alternative<Installed>(action)) commit(a);
  if (const auto* ended = std::get_if<Ended>(&action)) {
    goes_down(a);
    const bool known = ended->code == 0 || ended->code == 5;
    if (!known) violate(fmt::format("{} ends with {}: {}", a, ended->code, ended->reason));
  }
}

void World::tell(int a, const Event& event) {
  perform_all(a, memberships_->handled(node(a).known, event));
}

void World::receive(int a, int from, const Packet* packet) {
  perform_all(a, memberships_->handled(node(a).known, id_of(from), packet));
}

void World::perform_all(int a, const Memberships::Outcome& outcome) {
  if (outcome.after != node(a).known) edit(a).known = outcome.after;
  for (std::size_t i = 0; i < outcome.actions.size(); ++i) {
    perform(a, outcome.actions[i], outcome.packets[i]);
  }
  if (node(a).membership().seen > 1 + options_.ballots) beyond_ = true;
  if (!options_.at_once || !node(a).up) return;
  if (node(a).main == Node::Main::kStopping) apply({Kind::kRest, static_cast<std::int8_t>(a)});
  if (can_restore(a)) restore(a);
}

// Before somebody notices it, a member that was stopped or cut off is only slow: `at_once` has the
// first that notices (`by`) do so at once.
void World::add_faults(std::vector<Happening>& all) const {
  const auto add = [&](Kind kind, int a, int b) {
    for (int by = 0; by < size(); ++by) {
      const bool cut = kind == Kind::kCut;
      const bool notices = options_.at_once && acts(by) && (cut || by != a) &&
                           cares(by, cut ? -1 : a, node(by).known->leader);
      if (notices || (!options_.at_once && by == 0)) {
        all.push_back({kind, static_cast<std::int8_t>(a), static_cast<std::int8_t>(b),
                       static_cast<std::int8_t>(notices ? by : -1)});
      }
    }
  };
  bool cut = false;
  bool noticed = false;
  for (int a = 0; a < size(); ++a) {
    for (int b = 0; b < a; ++b) {
      noticed = noticed || link(a, b) == Link::kBroken;
      cut = cut || link(a, b) == Link::kCut || link(a, b) == Link::kBroken;
    }
    if (node(a).up && node(a).stopped) all.push_back({Kind::kWake, static_cast<std::int8_t>(a)});
  }
  if (noticed || (cut && !options_.at_once)) all.push_back({Kind::kHeal});
  if (faults_ >= options_.faults) return;
  for (int a = 0; a < size(); ++a) {
    if (!acts(a)) continue;
    add(Kind::kCrash, a, 0);
    add(Kind::kStop, a, 0);
    for (int b = 0; options_.single_links && b < a; ++b) {
      if (link(a, b) == Link::kUp) add(Kind::kCutLink, a, b);
    }
  }
  if (cut || !options_.cuts) return;
  const int joined = size() - (joins_ == 0 ? options_.newcomers : 0);
  for (int set = 1; set < 1 << (joined - 1); ++set) add(Kind::kCut, 0, set);
}

std::vector<Happening> World::next() const {
  std::vector<Happening> all;
  if (beyond_ || !violation_.empty()) return all;
  const auto add = [&](Kind kind, int a, int b = 0) {
    all.push_back({kind, static_cast<std::int8_t>(a), static_cast<std::int8_t>(b)});
  };
  for (int a = 0; a < size(); ++a) {
    const MemberId lowest = node(a).known->leader;
    for (int b = 0; b < size(); ++b) {
      if (a == b) continue;
      if (acts(b) && link(a, b) == Link::kUp && first(a, b) != nullptr) {
        add(Kind::kDeliver, a, b);
      }
      if (acts(a) && node(a).told[idx(b)] != Fate::kDead && fate(a, b) != node(a).told[idx(b)] &&
          cares(a, b, lowest)) {
        add(Kind::kTell, a, b);
      }
      if (a < b && link(a, b) == Link::kMended && acts(a) && acts(b)) add(Kind::kReconnect, a, b);
    }
    if (!acts(a)) continue;
    add_work(a, all);
    add_change_work(a, all);
    if (lowest == id_of(a)) add_changes(a, all);
  }
  add_faults(all);
  return all;
}

void World::apply(const Happening& happening) {
  const int a = happening.a;
  const int b = happening.b;
  switch (happening.kind) {
    case Kind::kDeliver: {
      const auto head = std::ranges::find_if(
          flight_, [&](const InFlight& one) { return one.from == a && one.to == b; });
      const Packet* const packet = head->packet;
      flight_.erase(head);
      receive(b, a, packet);
      break;
    }
    case Kind::kTell: {
      const Fate told = fate(a, b);
      edit(a).told[idx(b)] = told;
      if (told == Fate::kDead) forget(b, a);
      if (told == Fate::kSilent && link(a, b) != Link::kUp) break_link(a, b);
      tell(a, FateTold{id_of(b), told});
      break;
    }
    case Kind::kReconnect:
      set_link(a, b, Link::kUp);
      edit(a).told[idx(b)] = edit(b).told[idx(a)] = Fate::kAlive;
      tell(a, FateTold{id_of(b), Fate::kAlive});
      tell(b, FateTold{id_of(a), Fate::kAlive});
      break;
    case Kind::kRest:
      edit(a).main = Node::Main::kAtRest;
      tell(a, Quieted{report_of(a)});
      break;
    case Kind::kRestore:
      restore(a);
      break;
    case Kind::kCommit:
      tell(a, Formed{});
      break;
    case Kind::kComplete:
      complete(a);
      break;
    case Kind::kUpdate:
      update(a);
      break;
    case Kind::kCopyMoved:
    case Kind::kApplyMove:
      apply_move(a, happening.kind);
      break;
    case Kind::kCheckpoint:
      ++checkpoints_;
      checkpoint_ = node(a).step;
      break;
    case Kind::kArrive:
      fetch(a, *change_of(a));
      edit(a).voted = static_cast<std::int8_t>(change_of(a)->next.generation);
      break;
    case Kind::kVote:
      vote(a, b != 0);
      break;
    case Kind::kRefuse:
      vote(a, false);
      break;
    case Kind::kHear:
      hear(a);
      break;
    case Kind::kTake:
      tell(a, Taken{});
      break;
    case Kind::kChange:
      begin_change(a, b);
      break;
    case Kind::kFail: {
      const Generation generation = view_of(a).generation;
      edit(a).failed = static_cast<std::int8_t>(generation);
      tell(a, GroupFailed{generation});
      break;
    }
    case Kind::kCrash:
      ++faults_;
      goes_down(a);
      break;
    case Kind::kStop:
      ++faults_;
      edit(a).stopped = true;
      break;
    case Kind::kWake:
      edit(a).stopped = false;
      break;
    case Kind::kCut:
      ++faults_;
      for (int i = 0; i < size(); ++i) {
        for (int j = 0; j < i; ++j) {
          if ((b >> i & 1) != (b >> j & 1) && link(i, j) == Link::kUp) set_link(i, j, Link::kCut);
        }
      }
      break;
    case Kind::kCutLink:
      ++faults_;
      set_link(a, b, Link::kCut);
      break;
    case Kind::kHeal:
      for (int i = 0; i < size(); ++i) {
        for (int j = 0; j < i; ++j) {
          if (link(i, j) == Link::kCut) set_link(i, j, Link::kUp);
          if (link(i, j) == Link::kBroken) set_link(i, j, Link::kMended);
        }
      }
      for (int i = 0; options_.at_once && i < size(); ++i) {
        for (int j = i + 1; j < size(); ++j) {
          if (link(i, j) == Link::kMended && acts(i) && acts(j)) {
            apply({Kind::kReconnect, static_cast<std::int8_t>(i), static_cast<std::int8_t>(j)});
          }
        }
      }
      break;
    case Kind::kRetry:
      if (times_out(a)) return apply({Kind::kFail, happening.a});
      tell(a, Retry{});
      break;
  }
  if (happening.by >= 0) notice(happening);
  check_runs();
}

void World::notice(const Happening& happening) {
  const int by = happening.by;
  for (int b = 0; b < size(); ++b) {
    if (b == by || fate(by, b) == node(by).told[idx(b)]) continue;
    if (node(by).told[idx(b)] == Fate::kDead || !cares(by, b, node(by).known->leader)) continue;
    return apply({Kind::kTell, happening.by, static_cast<std::int8_t>(b)});
  }
}

std::string World::outcome() const {
  std::string text;
  for (int a = 0; a < size(); ++a) {
    const Node& one = node(a);
    if (!one.up) {
      text += "-; ";
      continue;
    }
    const Membership& m = one.membership();
    text += fmt::format("{}{} {} {}/{}:", static_cast<int>(m.phase), one.stopped ? " stopped" : "",
                        m.standing.attempts.size(), m.promised.number, m.promised.proposer.value);
    for (const Member& member : m.standing.installed.members) {
      text += fmt::format(" {}", member.number);
    }
    text += "; ";
  }
  return text;
}

std::string World::describe() const {
  std::string text;
  for (int a = 0; a < size(); ++a) {
    const Node& one = node(a);
    const Membership& m = one.membership();
    text += fmt::format(
        "\n  {}{}{}: phase {} main {} group {} step {}{} promised {}/{} installed {}:", a,
        one.up ? "" : " down", one.stopped ? " stopped" : "", static_cast<int>(m.phase),
        static_cast<int>(one.main), one.group, one.step, one.complete ? " complete" : "",
        m.promised.number, m.promised.proposer.value, m.standing.installed.generation);
    for (const Member& member : m.standing.installed.members) {
      text += fmt::format(" {}", member.number);
    }
    text +=
        fmt::format(" attempts {} earlier {} gone {} silent {} holds", m.standing.attempts.size(),
                    m.standing.earlier.size(), m.standing.gone.size(), m.silent.size());
    for (const Copy& copy : one.copies) {
      text += fmt::format(" {}@{}:{}={}", copy.layer, copy.step, static_cast<int>(copy.kind),
                          copy.token);
    }
  }
  return text;
}

}  // namespace dynmo::elastic
