// SPDX-License-Identifier: Apache-2.0
#include "tests/elastic/survivors_world.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

namespace dynmo::elastic::explorer {
namespace {

constexpr auto kNow = Survivors::Clock::time_point() + std::chrono::hours(1);
const Place kPlace{.generation = 1, .size = 1, .address = "here", .port = 1, .secret = 1};

std::string name_of(const View& view) { return to_json(view).dump(); }

}  // namespace

// All its members are in it, or are about to be.
bool World::is_whole(const View& view) const {
  return std::ranges::all_of(view.members, [&](const Member& member) {
    const Node& theirs = node(index_of(member));
    return theirs.view == view &&
           (theirs.state == Node::State::kWell ||
            (theirs.state == Node::State::kMeets && met_.contains(name_of(view))));
  });
}

// None of them is about to be: they can agree on a change.
bool World::all_are_in(const View& view) const {
  return std::ranges::all_of(view.members, [&](const Member& member) {
    const Node& theirs = node(index_of(member));
    return theirs.view == view && theirs.state == Node::State::kWell;
  });
}

bool World::is_split() const {
  std::vector<View> whole;
  for (const Node& one : nodes_) {
    if (one.view.generation == 0 || std::ranges::count(whole, one.view) > 0) continue;
    if (is_whole(one.view)) whole.push_back(one.view);
  }
  return whole.size() > 1;
}

bool World::may(const Event& event) const {
  using enum Node::State;
  const Node& one = node(event.node);
  const bool myself = (event.mask >> event.node & 1U) != 0;
  switch (event.kind) {
    case Event::Kind::kDie:
      return one.state != kOutside && one.state != kEnded && deaths_ < options_.deaths;
    case Event::Kind::kLose:
      return one.state == kWell;
    case Event::Kind::kInstall:
    case Event::Kind::kGiveUp:
      return one.state == kMeets;
    case Event::Kind::kCall:
    case Event::Kind::kHear:
      return one.state == kLost && !myself;
    case Event::Kind::kChange:
      return one.state == kWell && changes_ < options_.changes &&
             (event.leaver >= 0 || event.joins) &&
             one.view.members.front().id == member(event.node).id &&
             (all_are_in(one.view) || options_.mutant == Mutant::kChangesAPart) &&
             (event.leaver < 0 || one.view.has(member(event.leaver).id));
  }
  return false;
}

std::vector<Event> World::next() const {
  std::vector<Event> all;
  const auto add = [&](const Event& event) {
    if (may(event)) all.push_back(event);
  };
  for (int i = 0; i < std::ssize(nodes_); ++i) {
    for (const auto kind :
         {Event::Kind::kDie, Event::Kind::kLose, Event::Kind::kInstall, Event::Kind::kGiveUp}) {
      add({kind, i});
    }
    for (unsigned mask = 0; mask < 1U << nodes_.size(); ++mask) {
      add({Event::Kind::kCall, i, mask});
      add({Event::Kind::kHear, i, mask});
      for (int leaver = -1; leaver < std::ssize(nodes_); ++leaver) {
        for (const bool joins : {false, true}) add({Event::Kind::kChange, i, mask, leaver, joins});
      }
    }
  }
  return all;
}

Event World::draw(Rng& rng, unsigned side) const {
  const std::uint64_t all = nodes_.size();
  const unsigned everybody = (1U << all) - 1;
  Event event{.kind = static_cast<Event::Kind>(rng.below(7)),
              .node = static_cast<int>(rng.below(all))};
  const unsigned mine = 1U << event.node;
  // Mostly those of the other side are silent, and all pass the barrier of a change.
  const bool usual = rng.below(8) > 0;
  if (event.kind == Event::Kind::kCall || event.kind == Event::Kind::kHear) {
    event.mask = (side & mine) != 0 ? everybody & ~side : side;
    if (!usual) event.mask = static_cast<unsigned>(rng.below(everybody + 1)) & ~mine;
  }
  if (event.kind != Event::Kind::kChange) return event;
  event.mask = usual ? everybody : static_cast<unsigned>(rng.below(everybody + 1));
  event.leaver = static_cast<int>(rng.below(all + 1)) - 1;
  event.joins = rng.below(2) == 0;
  return event;
}

bool World::apply(const Event& event) {
  Node& one = node(event.node);
  switch (event.kind) {
    case Event::Kind::kDie:
      one = {.state = Node::State::kEnded};
      ++deaths_;
      return true;
    case Event::Kind::kLose:
      if (one.view.size() == 1) return false;
      one.state = Node::State::kLost;
      return true;
    case Event::Kind::kGiveUp:
      one.state = Node::State::kLost;
      if (options_.mutant != Mutant::kKeepsAFailedView) one.view = one.before;
      return true;
    case Event::Kind::kCall:
    case Event::Kind::kHear:
      return may_survive(event.node, event);
    case Event::Kind::kInstall:
      return install(event.node);
    case Event::Kind::kChange:
      return change(event);
  }
  return false;
}

bool World::may_survive(int i, const Event& event) {
  Node& one = node(i);
  bool half = options_.mutant == Mutant::kHalfIsEnough;
  Survivors survivors(
      {.before = one.view, .generation = one.newest, .replicas = options_.replicas, .why = {}},
      member(i),
      [&](const Member& other) -> Answer {
        if ((event.mask >> index_of(other) & 1U) != 0) {
          const bool ended = options_.mutant == Mutant::kSilentIsDead || std::exchange(half, false);
          return {.fate = ended ? Fate::kDead : Fate::kSilent};
        }
        const Node& theirs = node(index_of(other));
        const bool lost = theirs.state == Node::State::kLost;
        if (theirs.state == Node::State::kEnded ||
            (lost && options_.mutant == Mutant::kLostIsDead)) {
          return {.fate = Fate::kDead};
        }
        return {.fate = Fate::kAlive, .notice = theirs.notice};
      },
      one.standing, std::chrono::seconds(0));
  survivors.look(kNow);
  auto call = event.kind == Event::Kind::kHear ? survivors.heard() : survivors.call();
  if (!call || call->next.members.empty() || call->next.generation > options_.newest) return false;
  if (!call->next.has(member(i).id)) {
    one = {.state = Node::State::kEnded};
    return true;
  }
  call->place = kPlace;
  if (event.kind == Event::Kind::kCall) {
    const bool is_new = std::exchange(one.notice, text_of(*call)) != text_of(*call);
    if (call->waits) return is_new;
  }
  one.before = one.view;
  one.view = call->next;
  one.newest = std::max(one.newest, call->next.generation);
  one.state = Node::State::kMeets;
  const std::string name = name_of(one.view);
  const bool all = std::ranges::all_of(one.view.members, [&](const Member& member) {
    const Node& theirs = node(index_of(member));
    return theirs.state == Node::State::kMeets && theirs.view == one.view;
  });
  if (!all || met_.contains(name)) return true;
  for (const Member& member : one.view.members) {
    const Node& theirs = node(index_of(member));
    Standing told = theirs.standing;
    told.open.push_back(theirs.before);
    merge(met_[name], told);
  }
  return true;
}

bool World::install(int i) {
  Node& one = node(i);
  const auto met = met_.find(name_of(one.view));
  if (met == met_.end()) return false;
  merge(one.standing, met->second);
  note_formed(one.standing, one.view, one.before);
  if (options_.mutant == Mutant::kForgetsOpenEnds) one.standing.open.clear();
  one.notice = text_of({.next = one.view, .place = kPlace});
  one.state = Node::State::kWell;
  return true;
}

// All members of the group have agreed on it, as train/regrouping.h has it.
bool World::change(const Event& event) {
  const View before = node(event.node).view;
  Generation number = before.generation;
  for (const Member& member : before.members) {
    number = std::max(number, node(index_of(member)).newest);
  }
  View next{.generation = number + 1};
  for (const Member& one : before.members) {
    if (index_of(one) != event.leaver) next.members.push_back(one);
  }
  if (event.joins) {
    const auto newcomer = std::ranges::find(nodes_, Node::State::kOutside, &Node::state);
    if (newcomer == nodes_.end()) return false;
    next.members.push_back(member(static_cast<int>(newcomer - nodes_.begin())));
  }
  if (next.generation > options_.newest || next.members.empty()) return false;
  for (const Member& member : before.members) {
    for (const View& view : node(index_of(member)).standing.open) {
      if (options_.mutant != Mutant::kAnyChange &&
          !has_quorum(view, next, node(index_of(member)).standing)) {
        return false;
      }
    }
  }
  ++changes_;
  Standing standing = node(event.node).standing;
  standing.open = open_ends(standing.open, next, standing);
  if (options_.mutant == Mutant::kChangeForgetsOpenEnds) standing.open.clear();
  const bool leads = (event.mask >> event.node & 1U) != 0;
  for (int i = 0; i < std::ssize(nodes_); ++i) {
    const bool passes = (event.mask >> i & 1U) != 0;
    if (next.has(member(i).id) && !before.has(member(i).id)) {
      node(i).state = leads && passes ? Node::State::kWell : Node::State::kEnded;
      node(i).standing = options_.mutant == Mutant::kNewcomersKnowNothing ? Standing() : standing;
    } else if (before.has(member(i).id)) {
      if (!passes || !next.has(member(i).id)) {
        if (options_.mutant == Mutant::kGoesOnWithoutTheChange) continue;
        node(i) = {.state = Node::State::kEnded};
        continue;
      }
      node(i).standing = standing;
    } else {
      continue;
    }
    node(i).view = next;
    node(i).newest = next.generation;
    if (node(i).state == Node::State::kEnded) node(i) = {.state = Node::State::kEnded};
  }
  return true;
}

std::string World::text() const {
  std::string text = fmt::format("{} {}", deaths_, changes_);
  const auto add = [&](const View& view) {
    text += fmt::format("[{}:", view.generation);
    for (const Member& member : view.members) text += fmt::format("{}", member.number);
    text += ']';
  };
  for (const Node& one : nodes_) {
    text += fmt::format("\n{} {} ", static_cast<int>(one.state), one.newest);
    add(one.view);
    if (one.state == Node::State::kMeets) add(one.before);
    text += '|';
    for (const View& view : one.standing.open) add(view);
    text += "|dead";
    for (const MemberId id : one.standing.dead) text += fmt::format(" {}", id.value - 1);
    text += '|' + one.notice;
  }
  for (const auto& [name, standing] : met_) text += name;
  return text;
}

std::string line_of(const Event& event) {
  static constexpr std::array kNames = {"dies",  "loses its group", "has met", "gives up meeting",
                                        "calls", "hears",           "changes"};
  return fmt::format("{} {}, mask {:b}, leaver {}, joins {}", event.node,
                     kNames[static_cast<std::size_t>(event.kind)], event.mask, event.leaver,
                     event.joins);
}

}  // namespace dynmo::elastic::explorer
