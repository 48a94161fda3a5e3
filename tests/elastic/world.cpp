// SPDX-License-Identifier: Apache-2.0
// The members and the network of a world; world_group.cpp has what they compute and hold.
#include "tests/elastic/world.h"

#include <fmt/format.h>

#include <algorithm>

#include "dynmo/core/digest.h"

namespace dynmo::elastic {
namespace {

constexpr std::array<const char*, 21> kKindNames = {
    "deliver", "tell",       "reconnect",  "rest",       "restore",  "commit", "complete",
    "update",  "copy moved", "apply move", "checkpoint", "join",     "change", "fail",
    "crash",   "stop",       "wake",       "cut",        "cut link", "heal",   "retry"};

MemberId id_of(int node) { return {.value = static_cast<std::uint64_t>(node) + 1}; }

Member member_of(int node) { return {.id = id_of(node), .number = node}; }

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
  void add(const Reported& reported) {
    add(reported.standing);
    add(reported.report.member.id);
    add(reported.report.step);
    add(reported.report.gradients_complete);
    for (const Holding& held : reported.report.holdings) {
      add(held.layer.value);
      add(held.step);
      add(held.kind);
    }
  }
  void add(const Membership& m) {
    add(m.phase);
    add(m.standing);
    add(m.seen);
    add(m.promised);
    add(m.silent);
    add(m.group_failed);
    add(m.quiet_for);
    add(m.standbys);
    add(m.forming.has_value());
    add(m.proposal.has_value());
    if (!m.proposal) return;
    add(m.proposal->prepare.ballot);
    add(m.proposal->prepare.why);
    add(m.proposal->stage);
    add(m.proposal->drop);
    add(m.proposal->add);
    add(m.proposal->reports);
  }
  [[nodiscard]] std::uint64_t hash() const { return digest_of(text_).low; }

 private:
  std::string text_;
};

}  // namespace

std::string to_string(const Happening& happening) {
  return fmt::format("{} {} {}", kKindNames[static_cast<std::size_t>(happening.kind)], happening.a,
                     happening.b);
}

World::World(const WorldOptions& options) : options_(options) {
  View view{.generation = 1};
  for (int i = 0; i < options.members; ++i) view.members.push_back(member_of(i));
  const Settings settings{.model = {.layers = options.layers}, .rules = options.rules};
  for (int i = 0; i < options.members + options.joiners; ++i) {
    Node& made = nodes_.emplace_back();
    if (i >= options.members) {
      made.membership = standby(settings, member_of(i));
      continue;
    }
    made.membership = first_member(settings, view, id_of(i));
    made.main = Node::Main::kRunning;
    made.group = 1;
    for (int layer = 0; layer < options.layers; ++layer) {
      const bool mine = options.replicas || layer * options.members / options.layers == i;
      if (mine) made.copies.push_back({.layer = static_cast<std::int8_t>(layer)});
    }
  }
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
  const Membership& m = node(a).membership;
  if (b < 0) {
    for (int other = 0; other < size(); ++other) {
      if (other != a && cares(a, other, lowest)) return true;
    }
    return false;
  }
  if (node(a).told[idx(b)] == Fate::kSilent) return true;
  if (lowest == id_of(a)) {
    return m.proposal.has_value() || m.standing.installed.has(id_of(b)) ||
           (m.forming && m.forming->view.has(id_of(b)));
  }
  return lowest == id_of(b) || m.promised.proposer == id_of(b);
}

void World::break_link(int a, int b) {
  if (link(a, b) == Link::kCut) set_link(a, b, Link::kBroken);
  queues_[idx(a)][idx(b)].clear();
  queues_[idx(b)][idx(a)].clear();
}

void World::send(int a, MemberId to, const Message& message) {
  const int b = node_of(to);
  if (!node(b).up) {  // told again where it was forgotten
    const auto& gone = node(a).membership.standing.gone;
    if (std::find(gone.begin(), gone.end(), to) == gone.end()) node(a).told[idx(b)] = Fate::kAlive;
    return;
  }
  if (link(a, b) == Link::kBroken || link(a, b) == Link::kMended) return;
  auto packet = std::make_shared<Packet>();
  packet->message = message;
  auto& queue = queues_[idx(a)][idx(b)];
  if (options_.at_once) {
    packet->hash = digest_of(*encode(message)).low;
    for (const auto& waiting : queue) {
      if (waiting->hash == packet->hash) return;
    }
  }
  queue.push_back(std::move(packet));
}

void World::perform(int a, const Action& action) {
  Node& mine = node(a);
  if (const auto* sent = std::get_if<Send>(&action)) {
    if (const auto* form = std::get_if<Form>(&sent->message)) check_decision(a, *form);
    return send(a, sent->to, sent->message);
  }
  if (const auto* quiet = std::get_if<Quiet>(&action)) {
    mine.why = quiet->why;
    if (quiet->why == Why::kLoss) mine.group = 0;
    if (!options_.keep_shadows && !mine.applied) {
      std::erase_if(mine.copies, [](const Copy& copy) { return copy.kind == CopyKind::kShadow; });
    }
    mine.main = Node::Main::kStopping;
  }
  if (const auto* form = std::get_if<FormGroup>(&action)) {
    check_decision(a, form->form);
    mine.main = Node::Main::kRestoring;
    mine.group = 0;
  }
  if (std::holds_alternative<Installed>(action)) commit(a);
  if (const auto* ended = std::get_if<Ended>(&action)) {
    mine.up = false;
    const bool known = ended->code == 0 || ended->code == 5;
    if (!known) violate(fmt::format("{} ends with {}: {}", a, ended->code, ended->reason));
  }
}

void World::tell(int a, const Event& event) {
  for (const Action& action : handle(node(a).membership, event)) perform(a, action);
  if (node(a).membership.seen > 1 + options_.ballots) beyond_ = true;
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
                           cares(by, cut ? -1 : a, leader(node(by).membership));
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
    if (!acts(a) || (a >= options_.members && !(joins_ >> a & 1))) continue;
    add(Kind::kCrash, a, 0);
    add(Kind::kStop, a, 0);
    for (int b = 0; options_.single_links && b < a; ++b) {
      if (link(a, b) == Link::kUp) add(Kind::kCutLink, a, b);
    }
  }
  if (cut || !options_.cuts) return;
  const int joined = size() - (joins_ == 0 ? options_.joiners : 0);
  for (int set = 1; set < 1 << (joined - 1); ++set) add(Kind::kCut, 0, set);
}

std::vector<Happening> World::next() const {
  std::vector<Happening> all;
  if (beyond_ || !violation_.empty()) return all;
  const auto add = [&](Kind kind, int a, int b = 0) {
    all.push_back({kind, static_cast<std::int8_t>(a), static_cast<std::int8_t>(b)});
  };
  for (int a = 0; a < size(); ++a) {
    const MemberId lowest = leader(node(a).membership);
    for (int b = 0; b < size(); ++b) {
      if (a == b) continue;
      if (acts(b) && link(a, b) == Link::kUp && !queues_[idx(a)][idx(b)].empty()) {
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
    const Membership& m = node(a).membership;
    if (m.phase == Phase::kStandby && !(joins_ >> a & 1)) {
      for (int b = 0; b < options_.members; ++b) {
        if (acts(b) && reach(a, b)) add(Kind::kJoin, a, b);
      }
    }
    const bool may_change = changes_ < options_.changes && m.phase == Phase::kRun && !m.proposal &&
                            lowest == id_of(a) && between_steps(a);
    const int members = m.standing.installed.size();
    for (int drop = m.standbys.empty() ? 1 : 0; may_change && drop + 1 < 1 << members; ++drop) {
      add(Kind::kChange, a, drop);
    }
  }
  add_faults(all);
  return all;
}

void World::apply(const Happening& happening) {
  const int a = happening.a;
  const int b = happening.b;
  switch (happening.kind) {
    case Kind::kDeliver: {
      auto& queue = queues_[idx(a)][idx(b)];
      const auto packet = queue.front();
      queue.erase(queue.begin());
      tell(b, Received{id_of(a), packet->message});
      break;
    }
    case Kind::kTell: {
      const Fate told = fate(a, b);
      node(a).told[idx(b)] = told;
      if (told == Fate::kDead) queues_[idx(b)][idx(a)].clear();
      if (told == Fate::kSilent && link(a, b) != Link::kUp) break_link(a, b);
      tell(a, FateTold{id_of(b), told});
      break;
    }
    case Kind::kReconnect:
      set_link(a, b, Link::kUp);
      node(a).told[idx(b)] = node(b).told[idx(a)] = Fate::kAlive;
      tell(a, FateTold{id_of(b), Fate::kAlive});
      tell(b, FateTold{id_of(a), Fate::kAlive});
      break;
    case Kind::kRest:
      node(a).main = Node::Main::kAtRest;
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
    case Kind::kJoin:
      joins_ |= 1 << a;
      tell(a, JoinThrough{id_of(b)});
      break;
    case Kind::kChange: {
      ++changes_;
      Change change;
      const Membership& m = node(a).membership;
      for (int i = 0; i < m.standing.installed.size(); ++i) {
        if (b >> i & 1) change.drop.push_back(m.standing.installed.members[idx(i)].id);
      }
      for (const Member& member : m.standbys) change.add.push_back(member.id);
      tell(a, change);
      break;
    }
    case Kind::kFail: {
      const Membership& m = node(a).membership;
      const bool forms = m.phase == Phase::kForming;
      node(a).failed = static_cast<std::int8_t>(forms ? m.forming->view.generation
                                                      : m.standing.installed.generation);
      tell(a, GroupFailed{forms ? m.forming->view.generation : m.standing.installed.generation});
      break;
    }
    case Kind::kCrash:
      ++faults_;
      node(a).up = false;
      break;
    case Kind::kStop:
      ++faults_;
      node(a).stopped = true;
      break;
    case Kind::kWake:
      node(a).stopped = false;
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
    if (node(by).told[idx(b)] == Fate::kDead || !cares(by, b, leader(node(by).membership)))
      continue;
    return apply({Kind::kTell, happening.by, static_cast<std::int8_t>(b)});
  }
}

std::uint64_t World::hash() const {
  StateBytes bytes;
  for (const Node& one : nodes_) {
    bytes.add(one.up);
    bytes.add(one.done_group);
    bytes.add(one.done_step);
    bytes.add(one.step);
    bytes.add(one.copies.size());
    for (const Copy& copy : one.copies) {
      bytes.add(copy.layer);
      bytes.add(copy.step);
      bytes.add(copy.kind);
      bytes.add(copy.token);
    }
    if (!one.up) continue;
    bytes.add(one.membership);
    bytes.add(one.stopped);
    bytes.add(one.main);
    bytes.add(one.why);
    bytes.add(one.group);
    bytes.add(one.first_step);
    bytes.add(one.complete);
    bytes.add(one.updated);
    bytes.add(one.applied);
    bytes.add(one.failed);
    for (int b = 0; b < size(); ++b) bytes.add(one.told[idx(b)]);
  }
  for (int a = 0; a < size(); ++a) {
    for (int b = 0; b < size(); ++b) {
      bytes.add(link(a, b));
      const auto& queue = queues_[idx(a)][idx(b)];
      bytes.add(queue.size());
      for (const auto& packet : queue) {
        bytes.add(packet->hash);
      }
    }
  }
  bytes.add(faults_);
  bytes.add(changes_);
  bytes.add(joins_);
  bytes.add(checkpoints_);
  bytes.add(checkpoint_);
  for (const auto& [generation, step] : snapshots_) {
    bytes.add(generation);
    bytes.add(step);
  }
  return bytes.hash();
}

std::string World::describe() const {
  std::string text;
  for (int a = 0; a < size(); ++a) {
    const Node& one = node(a);
    const Membership& m = one.membership;
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
