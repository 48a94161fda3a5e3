// SPDX-License-Identifier: Apache-2.0
// Members of a run meet losses, silence and planned changes in all orders, and in random ones where
// there are more of them: never do two groups have all their members, so that both could take a
// step. Each member is the code that a run uses (survivors.h, quorum.h); what the explorer adds is
// the fate of messages.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/elastic/survivors.h"
#include "tests/support/samples.h"

namespace dynmo::elastic {
namespace {

// A rule that is left out, to see that it is needed.
enum class Mutant { kNone, kForgetsOpenEnds, kNewcomersKnowNothing, kAnyChange };

struct Options {
  int members = 3;
  int replicas = 1;
  int newcomers = 0;
  int deaths = 1;
  int changes = 0;
  Generation newest = 3;  // no view is above
  Mutant mutant = Mutant::kNone;
};

struct Node {
  enum class State { kOutside, kWell, kLost, kMeets, kEnded };
  State state = State::kOutside;
  View view = {};    // kMeets: the one that is to be; else in force
  View before = {};  // kMeets: in force
  Standing standing = {};
  Generation newest = 1;  // that it has called or heard
  std::string notice = {};
};

constexpr auto kNow = Survivors::Clock::time_point() + std::chrono::hours(1);
const Place kPlace{.generation = 1, .size = 1, .address = "here", .port = 1, .secret = 1};

struct Event {
  enum class Kind { kDie, kLose, kInstall, kGiveUp, kCall, kHear, kChange };
  Kind kind = Kind::kDie;
  int node = 0;
  unsigned mask = 0;  // kCall, kHear: who does not answer; kChange: who passes the barrier
  int leaver = -1;
  bool joins = false;
};

class World {
 public:
  explicit World(const Options& options)
      : options_(options), nodes_(static_cast<std::size_t>(options.members + options.newcomers)) {
    View first{.generation = 1};
    for (int i = 0; i < options.members; ++i) first.members.push_back(member(i));
    for (int i = 0; i < options.members; ++i)
      node(i) = {.state = Node::State::kWell, .view = first};
  }

  bool may(const Event& event) const;
  std::vector<Event> next() const;
  // One that may not be; the nodes of `side` hear each other, and those of the other side.
  Event draw(Rng& rng, unsigned side) const;
  // False: nothing has come of it.
  bool apply(const Event& event);
  // More than one group could take a step.
  bool is_split() const;
  std::string text() const;

 private:
  static Member member(int i) {
    return {.id = {static_cast<std::uint64_t>(i) + 1},
            .number = i,
            .host = fmt::format("{}", i),
            .pid = 1};
  }
  static int index_of(const Member& member) { return member.number; }
  Node& node(int i) { return nodes_[static_cast<std::size_t>(i)]; }
  const Node& node(int i) const { return nodes_[static_cast<std::size_t>(i)]; }
  bool is_whole(const View& view) const;
  bool may_survive(int i, const Event& event);
  bool install(int i);
  bool change(const Event& event);

  Options options_;
  std::vector<Node> nodes_;
  std::map<std::string, Standing> met_;  // by view: what its members have told each other
  int deaths_ = 0;
  int changes_ = 0;
};

std::string name_of(const View& view) { return to_json(view).dump(); }

// All its members are in it, or are about to be.
bool World::is_whole(const View& view) const {
  return std::ranges::all_of(view.members, [&](const Member& member) {
    const Node& theirs = node(index_of(member));
    return theirs.view == view &&
           (theirs.state == Node::State::kWell ||
            (theirs.state == Node::State::kMeets && met_.contains(name_of(view))));
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
             one.view.members.front().id == member(event.node).id && is_whole(one.view) &&
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
      one.view = one.before;
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
  Survivors survivors(
      {.before = one.view, .generation = one.newest, .replicas = options_.replicas, .why = {}},
      member(i),
      [&](const Member& other) -> Answer {
        if ((event.mask >> index_of(other) & 1U) != 0) return {};
        const Node& theirs = node(index_of(other));
        if (theirs.state == Node::State::kEnded) return {.fate = Fate::kDead};
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
  const bool leads = (event.mask >> event.node & 1U) != 0;
  for (int i = 0; i < std::ssize(nodes_); ++i) {
    const bool passes = (event.mask >> i & 1U) != 0;
    if (next.has(member(i).id) && !before.has(member(i).id)) {
      node(i).state = leads && passes ? Node::State::kWell : Node::State::kEnded;
      node(i).standing = options_.mutant == Mutant::kNewcomersKnowNothing ? Standing() : standing;
    } else if (before.has(member(i).id)) {
      if (!passes || !next.has(member(i).id)) {
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

struct Found {
  std::string split;  // the events that have led to it; "": none has
  std::int64_t events = 0;
  std::int64_t states = 0;
};

Found explore_all(const Options& options) {
  struct Level {
    World world;
    std::vector<Event> left;
    Event by = {};
  };
  Found found;
  std::unordered_set<std::size_t> seen;  // hashes: memory for millions
  std::vector<Level> path;
  const auto enter = [&](World world, const Event& by) {
    if (!seen.insert(std::hash<std::string>{}(world.text())).second) return;
    std::vector<Event> left = world.next();
    path.push_back({std::move(world), std::move(left), by});
  };
  enter(World(options), {});
  while (!path.empty()) {
    if (path.back().left.empty()) {
      path.pop_back();
      continue;
    }
    const Event event = path.back().left.back();
    path.back().left.pop_back();
    World next = path.back().world;
    if (!next.apply(event)) continue;
    ++found.events;
    if (next.is_split()) {
      for (const Level& level : path) found.split += line_of(level.by) + "\n";
      found.split += line_of(event) + "\n" + next.text();
      break;
    }
    enter(std::move(next), event);
  }
  found.states = std::ssize(seen);
  return found;
}

// One schedule, a function of the seed.
Found explore_one(const Options& options, std::uint64_t seed) {
  Rng rng(mix_key({seed, 0x50f7}));
  World world(options);
  Found found;
  std::string story;
  unsigned side = 0;
  for (int i = 0; i < 1000; ++i) {
    if (rng.below(100) == 0) side = static_cast<unsigned>(rng.below(1U << 7));
    const Event event = world.draw(rng, side);
    if (!world.may(event)) continue;
    const bool rare = event.kind == Event::Kind::kDie || event.kind == Event::Kind::kGiveUp;
    if (rare && rng.below(4) > 0) continue;
    if (!world.apply(event)) continue;
    ++found.events;
    story += line_of(event) + "\n";
    if (!world.is_split()) continue;
    found.split = fmt::format("seed {}\n{}{}", seed, story, world.text());
    break;
  }
  return found;
}

TEST(SurvivorsExplorer, NoTwoGroupsTakeStepsInAnyOrderOfEvents) {
  std::vector<Options> spaces = {{.members = 2, .newcomers = 1, .deaths = 1, .changes = 1}};
  if (draws_all_samples()) {
    spaces.push_back({.members = 3, .deaths = 1, .newest = 3});
    spaces.push_back({.members = 4, .replicas = 2, .deaths = 1, .newest = 2});
  }
  if (draws_all_samples() && std::getenv("DYNMO_SAMPLES") != nullptr) {
    spaces.push_back({.members = 3, .deaths = 2, .newest = 3});
  }
  for (const Options& options : spaces) {
    const Found found = explore_all(options);
    std::printf(
        "[          ] %d members in %d replicas, %d newcomers, %d deaths, %d changes, %lld views: "
        "%lld events, %lld states\n",
        options.members, options.replicas, options.newcomers, options.deaths, options.changes,
        static_cast<long long>(options.newest), static_cast<long long>(found.events),
        static_cast<long long>(found.states));
    EXPECT_EQ(found.split, "");
    EXPECT_GT(found.states, 100);
  }
}

constexpr Options kMany = {.members = 5, .newcomers = 2, .deaths = 4, .changes = 3, .newest = 9};

TEST(SurvivorsExplorer, NoTwoGroupsTakeStepsInRandomSchedules) {
  const char* samples = std::getenv("DYNMO_SAMPLES");
  const std::uint64_t schedules = samples != nullptr && draws_all_samples() ? 40000
                                  : draws_all_samples()                     ? 1500
                                                                            : 300;
  std::int64_t events = 0;
  for (std::uint64_t seed = 0; seed < schedules; ++seed) {
    for (const int members : {3, 4, 5}) {
      Options options = kMany;
      options.members = members;
      const Found found = explore_one(options, seed);
      events += found.events;
      ASSERT_EQ(found.split, "") << members << " members";
    }
    for (const int replicas : {2, 3}) {
      const Found found =
          explore_one({.members = 6, .replicas = replicas, .deaths = 4, .newest = 9}, seed);
      events += found.events;
      ASSERT_EQ(found.split, "") << replicas << " replicas";
    }
  }
  std::printf("[          ] %lld events\n", static_cast<long long>(events));
}

// From seeds a little before those that show it: all before them take half a minute.
TEST(SurvivorsExplorer, EachRuleIsNeeded) {
  const std::array<std::pair<Mutant, std::uint64_t>, 3> seeds = {
      {{Mutant::kForgetsOpenEnds, 0},
       {Mutant::kNewcomersKnowNothing, 26000},
       {Mutant::kAnyChange, 36600}}};
  for (const auto& [mutant, first] : seeds) {
    std::uint64_t seed = first;
    bool split = false;
    for (; !split && seed < first + 20000; ++seed) {
      Options options = kMany;
      options.members = 3 + static_cast<int>(seed % 3);
      options.mutant = mutant;
      split = !explore_one(options, seed).split.empty();
    }
    EXPECT_TRUE(split) << "rule " << static_cast<int>(mutant);
    std::printf("[          ] without rule %d: schedule %llu\n", static_cast<int>(mutant),
                static_cast<unsigned long long>(seed - 1));
  }
}

}  // namespace
}  // namespace dynmo::elastic
