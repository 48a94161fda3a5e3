// SPDX-License-Identifier: Apache-2.0
// Planned changes of the view: the group in force agrees on one, its members and a newcomer bring
// the layers to where the next view has them, vote, hear the votes, and take the change or keep
// what they have (docs/decisions/016-the-old-group-decides.md).
#include <algorithm>

#include "tests/elastic/world.h"

namespace dynmo::elastic {

// The change that `a` takes part in: as a member of the view in force that has not heard a no, or
// as a newcomer that is not confirmed.
const Planned* World::change_of(int a) const {
  const Node& mine = node(a);
  const Membership& m = mine.membership();
  if (m.phase != Phase::kRun || mine.main != Node::Main::kRunning || planned_.empty())
    return nullptr;
  for (const Planned& change : planned_) {
    const bool newcomer =
        m.standing.installed.generation == 0 && change.next == m.standing.attempts.front();
    const bool member = m.standing.installed == change.base && mine.group == change.base.generation;
    if (newcomer || (member && mine.kept < change.next.generation)) return &change;
  }
  return nullptr;
}

// All members of the view in force meet for it between two steps.
void World::add_changes(int a, std::vector<Happening>& all) const {
  const Node& mine = node(a);
  const Membership& m = mine.membership();
  const View& view = m.standing.installed;
  const bool may = changes_ < options_.changes && m.phase == Phase::kRun && !m.proposal &&
                   view.generation > 0 && mine.group == view.generation && between_steps(a) &&
                   std::ranges::all_of(view.members, [&](const Member& member) {
                     const Node& other = node(node_of(member.id));
                     return acts(node_of(member.id)) && reach(a, node_of(member.id)) &&
                            other.main == Node::Main::kRunning && other.group == mine.group &&
                            other.membership().phase == Phase::kRun && other.step == mine.step &&
                            !other.complete && change_of(node_of(member.id)) == nullptr;
                   });
  if (!may) return;
  const auto add = [&](int set) {
    if (may_try(m, next_view(a, set))) all.push_back({Kind::kChange, small(a), small(set)});
  };
  for (int drop = 0; drop + 1 < 1 << view.size(); ++drop) {
    if (drop > 0) add(drop);
    if (joins_ == 0 && options_.newcomers > 0) add(-1 - drop);
  }
}

View World::next_view(int a, int set) const {
  const Membership& m = node(a).membership();
  const View& view = m.standing.installed;
  View next{.generation = m.seen + 1};
  for (int i = 0; i < view.size(); ++i) {
    const bool drops = ((set < 0 ? -1 - set : set) >> i & 1) != 0;
    if (!drops) next.members.push_back(view.members[idx(i)]);
  }
  if (set < 0) next.members.push_back(node(options_.members).membership().self);
  return next;
}

void World::begin_change(int a, int set) {
  ++changes_;
  const Membership& m = node(a).membership();
  const Planned change{.base = m.standing.installed, .next = next_view(a, set)};
  if (set < 0) {
    const int joins = options_.members;
    joins_ |= 1 << joins;
    Node& born = edit(joins);
    born.up = true;
    born.main = Node::Main::kRunning;
    born.known = memberships_->known(
        newcomer(m.settings, change.next, born.membership().self.id, views_that_count(m)));
  }
  planned_.push_back(change);
}

// A copy of a layer as it is now, with anybody who takes part and can send it.
const Copy* World::find_for_change(int a, const Planned& change, int layer) const {
  const int step = node(node_of(change.next.members.front().id)).step;
  for (int b = 0; b < size(); ++b) {
    if (!acts(b) || !reach(a, b) || node(b).group != change.base.generation) continue;
    for (const Copy& copy : node(b).copies) {
      const bool now = copy.layer == layer && copy.step == step && copy.kind == CopyKind::kLive;
      if (now) return &copy;
    }
  }
  return nullptr;
}

bool World::can_fetch(int a, const Planned& change) const {
  for (int layer = 0; layer < options_.layers; ++layer) {
    if (wants(change.next, a, layer) && find_for_change(a, change, layer) == nullptr) return false;
  }
  return true;
}

void World::fetch(int a, const Planned& change) {
  std::vector<Copy> got;
  for (int layer = 0; layer < options_.layers; ++layer) {
    if (!wants(change.next, a, layer)) continue;
    Copy copy = *find_for_change(a, change, layer);
    copy.kind = CopyKind::kShadow;
    copy.fetched = true;
    got.push_back(copy);
  }
  Node& mine = edit(a);
  for (const Copy& copy : got) {
    const bool held = std::ranges::any_of(mine.copies, [&](const Copy& own) {
      return own.layer == copy.layer && own.step == copy.step &&
             (own.kind == CopyKind::kLive || own.kind == CopyKind::kShadow);
    });
    if (!held) mine.copies.push_back(copy);
  }
  const bool newcomer = mine.membership().standing.installed.generation == 0;
  if (newcomer) mine.step = node(node_of(change.next.members.front().id)).step;
}

// Whether a rank of the next view cannot come: then the others vote no.
bool World::is_troubled(const Planned& change) const {
  return std::ranges::any_of(change.next.members, [&](const Member& member) {
    const int b = node_of(member.id);
    const bool from_outside = node(b).membership().standing.installed.generation == 0;
    const bool cut = std::ranges::any_of(
        change.next.members, [&](const Member& other) { return !reach(b, node_of(other.id)); });
    return from_outside && (!acts(b) || cut || change_of(b) == nullptr);
  });
}

void World::add_change_work(int a, std::vector<Happening>& all) const {
  const Planned* change = change_of(a);
  if (change == nullptr) return;
  const Node& mine = node(a);
  const Membership& m = mine.membership();
  const Generation next = change->next.generation;
  const auto add = [&](Kind kind, int b = 0) { all.push_back({kind, small(a), small(b)}); };
  if (m.standing.installed.generation == 0) {
    const int leads = node_of(change->next.members.front().id);
    const bool in_force = node(leads).membership().standing.installed == change->next;
    if (mine.voted != next && can_fetch(a, *change)) add(Kind::kArrive);
    if (mine.voted == next && in_force && node(leads).group == next && reach(a, leads)) {
      add(Kind::kTake);
    }
    return;
  }
  const auto& members = node(a).membership().standing.installed.members;
  const auto all_reached = [&](auto holds) {
    return std::ranges::all_of(members, [&](const Member& member) {
      return reach(a, node_of(member.id)) && holds(node(node_of(member.id)));
    });
  };
  if (mine.voted != next) {
    const bool arrived = std::ranges::all_of(change->next.members, [&](const Member& member) {
      const Node& other = node(node_of(member.id));
      return other.membership().standing.installed.generation != 0 || other.voted == next;
    });
    if (is_troubled(*change)) {
      add(Kind::kVote, 0);
    } else if (arrived && can_fetch(a, *change) && m.promised.number < next) {
      add(Kind::kVote, 1);
      if (m.self.id == members.front().id) add(Kind::kRefuse);
    }
  } else if (mine.heard != next) {
    if (all_reached([&](const Node& other) { return other.voted == next; })) add(Kind::kHear);
  } else if (all_reached([&](const Node& other) { return other.heard == next; })) {
    add(Kind::kTake);
  }
}

void World::vote(int a, bool yes) {
  const Planned change = *change_of(a);
  if (yes) {
    fetch(a, change);
    tell(a, Tries{change.next});
  }
  edit(a).voted = small(change.next.generation);
  edit(a).yes = yes;
}

void World::hear(int a) {
  const Planned change = *change_of(a);
  const auto& members = node(a).membership().standing.installed.members;
  const bool all_yes = std::ranges::all_of(
      members, [&](const Member& member) { return node(node_of(member.id)).yes; });
  if (all_yes) {
    edit(a).heard = small(change.next.generation);
    return;
  }
  Node& mine = edit(a);
  const bool tried = mine.yes;
  mine.kept = small(change.next.generation);
  std::erase_if(mine.copies, [](const Copy& copy) { return copy.fetched; });
  if (tried) tell(a, Kept{});
}

// The layers that the next view has here are live from now on; the rest are spares until the next
// exchange.
void World::use_fetched(int a) {
  Node& mine = edit(a);
  const View& view = mine.membership().standing.installed;
  for (Copy& copy : mine.copies) {
    if (copy.kind != CopyKind::kLive && copy.kind != CopyKind::kShadow) continue;
    const bool live = copy.step == mine.step && wants(view, a, copy.layer);
    copy.kind = live ? CopyKind::kLive : CopyKind::kShadow;
    copy.fetched = false;
  }
  mine.first_step = mine.step;
  mine.done_step = -1;
}

}  // namespace dynmo::elastic
