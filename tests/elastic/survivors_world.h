// SPDX-License-Identifier: Apache-2.0
#pragma once

// Members of a run as the explorer of losses has them: each is the code that a run uses
// (survivors.h, quorum.h); what is added is the fate of messages.

#include <map>
#include <string>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/elastic/survivors.h"

namespace dynmo::elastic::explorer {

// A rule that is left out, to see that it is needed.
enum class Mutant {
  kNone,
  kForgetsOpenEnds,
  kNewcomersKnowNothing,
  kAnyChange,
  kSilentIsDead,            // who does not answer has ended
  kHalfIsEnough,            // one of those who do not answer has
  kKeepsAFailedView,        // who gives up meeting counts the new view as the one in force
  kChangeForgetsOpenEnds,   // a planned change closes all views before
  kGoesOnWithoutTheChange,  // who does not pass the barrier of a change stays in its group
  kChangesAPart,            // a change is not agreed on by all members
  kLostIsDead,              // who has lost its group has ended
};

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
  bool all_are_in(const View& view) const;
  bool may_survive(int i, const Event& event);
  bool install(int i);
  bool change(const Event& event);

  Options options_;
  std::vector<Node> nodes_;
  std::map<std::string, Standing> met_;  // by view: what its members have told each other
  int deaths_ = 0;
  int changes_ = 0;
};

// For people.
std::string line_of(const Event& event);

}  // namespace dynmo::elastic::explorer
