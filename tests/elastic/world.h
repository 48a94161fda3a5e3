// SPDX-License-Identifier: Apache-2.0
#pragma once

// A few members of a run, the network between them and what each holds, as a value: all that can
// happen next is a list of events, and an event makes the next world. Time is the order of events.
//
// A layer's content is a token, the step that it belongs to; so a layer restored wrongly shows. The
// group of a generation (steps, snapshots, moves of layers, restoring) is modelled by when each
// member can take its next step; the membership is the real one.

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/elastic/known.h"

namespace dynmo::elastic {

inline constexpr int kMaxNodes = 7;

constexpr std::int8_t small(std::int64_t number) { return static_cast<std::int8_t>(number); }

struct WorldOptions {
  int members = 3;
  int newcomers = 1;
  int layers = 3;
  int steps = 0;              // of training; 0: all are at rest between two steps
  int snapshot_every = 2;     // steps
  int checkpoints = 0;        // at most
  bool moves = false;         // a layer moves in the second step of a generation
  bool replicas = false;      // every member has every layer
  int faults = 2;             // at most
  int ballots = 3;            // at most
  int changes = 1;            // planned, at most; each may have a newcomer
  bool cuts = true;           // are among the faults
  bool single_links = false;  // links are cut one by one, too
  // Fewer events: main threads rest and restore as soon as they are asked to, a fault is noticed
  // by somebody at once, connections are made anew together, what is on its way is not said again.
  bool at_once = false;
  // Worlds that differ in nothing that can ever be seen are one: see World::hash.
  bool reduced = false;
  bool failures = false;  // groups fail at any time, not only where nothing else happens
  Rules rules = {};
  bool keep_shadows = true;  // of moved layers until the next exchange
  bool keep_slots = true;    // the old snapshot until all have the new one
};

enum class Kind : std::uint8_t {
  kDeliver,    // a -> b
  kTell,       // a is told that b is silent, dead or alive
  kReconnect,  // a - b
  kRest,       // the main thread of a
  kRestore,    // a brings its layers in place
  kCommit,     // a
  kComplete,   // gradients of a
  kUpdate,     // a
  kCopyMoved,  // a takes the layer that moves to it
  kApplyMove,  // a
  kArrive,     // the newcomer a has its layers
  kVote,       // a, for the change under way; b: 1 yes, 0 no
  kHear,       // a, the votes of all
  kTake,       // a: the change is in force
  kCheckpoint,
  kChange,  // all agree on one: drop the set b; below 0 the set -1 - b, with a newcomer
  kRefuse,  // a votes no
  kFail,    // the group of a
  kCrash,
  kStop,
  kWake,
  kCut,  // all links between the set b and the others
  kCutLink,
  kHeal,  // all links
  kRetry,
};

struct Happening {
  Kind kind = Kind::kDeliver;
  std::int8_t a = 0;
  std::int8_t b = 0;
  std::int8_t by = -1;  // who notices a fault at once; -1: nobody
};
[[nodiscard]] std::string to_string(const Happening& happening);

struct Copy {
  std::int8_t layer = 0;
  std::int8_t step = 0;
  CopyKind kind = CopyKind::kLive;
  std::int8_t token = 0;
  bool fetched = false;  // for a change that is not in force yet
};

// A planned change: what the members of the view `base` try together.
struct Planned {
  View base = {};
  View next = {};
};

struct Node {
  enum class Main : std::uint8_t { kIdle, kRunning, kStopping, kAtRest, kRestoring, kArrived };
  const Known* known = nullptr;
  [[nodiscard]] const Membership& membership() const { return known->membership; }
  bool up = true;
  bool stopped = false;
  Main main = Main::kIdle;
  std::int8_t group = 0;       // the generation that it computes in
  std::int8_t first_step = 0;  // of the group
  std::int8_t step = 0;
  bool complete = false;
  std::int8_t updated = -1;
  bool applied = false;         // the move of this generation
  std::int8_t failed = 0;       // the newest group that it has told as failed
  std::int8_t done_group = -1;  // where it completed gradients last
  std::int8_t done_step = -1;
  std::int8_t voted = 0;  // for which change; a newcomer: has arrived
  bool yes = false;
  std::int8_t heard = 0;  // a yes of all, and has said so
  std::int8_t kept = 0;   // heard a no
  std::vector<Copy> copies;
  std::array<Fate, kMaxNodes> told = {};
  mutable std::uint64_t hash = 0;  // once asked for; 0: to be computed
};

// Messages from one member to another arrive in the order in which they stand.
struct InFlight {
  std::int8_t from = 0;
  std::int8_t to = 0;
  const Packet* packet = nullptr;
};

class World {
 public:
  explicit World(const WorldOptions& options);

  // Returns the events that can happen: spontaneous ones, and faults, plans or repairs. None after
  // a violation or beyond the number of ballots.
  [[nodiscard]] std::vector<Happening> next() const;
  void apply(const Happening& happening);
  // Nothing happens of itself any more.
  void check_at_rest();

  [[nodiscard]] const std::string& violation() const { return violation_; }
  [[nodiscard]] bool beyond() const { return beyond_; }  // the number of ballots
  [[nodiscard]] std::uint64_t hash() const;
  [[nodiscard]] std::string outcome() const;  // who is left, in which phase, under which view
  [[nodiscard]] std::string describe() const;
  // No more faults: everything is repaired, and what is not answered is said again.
  void calm();
  [[nodiscard]] bool is_up(int a) const { return node(a).up; }
  [[nodiscard]] bool retries() const;  // whether anybody has something to say again

 private:
  enum class Link : std::uint8_t { kUp, kCut, kBroken, kMended };

  void tell(int a, const Event& event);
  void receive(int a, int from, const Packet* packet);
  void perform(int a, const Action& action, const Packet* packet);
  void send(int a, MemberId to, const Packet* packet);
  [[nodiscard]] bool reach(int a, int b) const;
  [[nodiscard]] bool acts(int a) const { return node(a).up && !node(a).stopped; }
  [[nodiscard]] Fate fate(int a, int b) const;
  [[nodiscard]] bool cares(int a, int b, MemberId leader) const;
  void notice(const Happening& happening);
  void break_link(int a, int b);

  [[nodiscard]] Report report_of(int a) const;
  void restore(int a);
  [[nodiscard]] bool can_restore(int a) const;
  [[nodiscard]] bool can_commit(int a) const;
  [[nodiscard]] bool can_complete(int a) const;
  [[nodiscard]] bool can_update(int a) const;
  void commit(int a);
  void complete(int a);
  void update(int a);
  [[nodiscard]] const View& view_of(int a) const;  // that it forms or computes in
  [[nodiscard]] bool broken(int a) const;
  [[nodiscard]] bool times_out(int a) const;
  [[nodiscard]] bool between_steps(int a) const;
  [[nodiscard]] bool is_born(int a) const { return a < options_.members || (joins_ >> a & 1) != 0; }
  [[nodiscard]] const Planned* change_of(int a) const;  // null: none under way
  void add_changes(int a, std::vector<Happening>& all) const;
  void add_change_work(int a, std::vector<Happening>& all) const;
  [[nodiscard]] bool wants(const View& view, int a, int layer) const;
  [[nodiscard]] const Copy* find_for_change(int a, const Planned& change, int layer) const;
  [[nodiscard]] bool can_fetch(int a, const Planned& change) const;
  [[nodiscard]] bool is_troubled(const Planned& change) const;
  [[nodiscard]] View next_view(int a, int set) const;
  void begin_change(int a, int set);
  void fetch(int a, const Planned& change);
  void vote(int a, bool yes);
  void hear(int a);
  void use_fetched(int a);
  [[nodiscard]] bool has_move(int a) const;
  [[nodiscard]] int role_in_move(int a) const;  // 0 none, 1 gives, 2 takes
  [[nodiscard]] bool taken(int a) const;
  void apply_move(int a, Kind kind);

  void add_faults(std::vector<Happening>& all) const;
  void add_work(int a, std::vector<Happening>& all) const;
  void check_runs();
  void check_layers(const View& view);
  void check_decision(int a, const Form& form);
  void violate(const std::string& what);

  static std::size_t idx(int a) { return static_cast<std::size_t>(a); }
  static int node_of(MemberId id) { return static_cast<int>(id.value) - 1; }
  [[nodiscard]] int size() const { return static_cast<int>(nodes_.size()); }
  [[nodiscard]] const Node& node(int a) const { return *nodes_[idx(a)]; }
  Node& edit(int a);  // not shared with other worlds from here on
  void goes_down(int a);
  void perform_all(int a, const Memberships::Outcome& outcome);
  [[nodiscard]] const Packet* first(int from, int to) const;  // null: none
  void forget(int from, int to);
  [[nodiscard]] std::uint64_t hash_of(const Node& one) const;
  [[nodiscard]] Link link(int a, int b) const { return links_[idx(a)][idx(b)]; }
  void set_link(int a, int b, Link to) { links_[idx(a)][idx(b)] = links_[idx(b)][idx(a)] = to; }

  WorldOptions options_;
  std::shared_ptr<Memberships> memberships_;
  std::vector<std::shared_ptr<Node>> nodes_;
  std::array<std::array<Link, kMaxNodes>, kMaxNodes> links_ = {};
  std::vector<InFlight> flight_;
  int faults_ = 0;
  int changes_ = 0;
  int joins_ = 0;                 // a set: newcomers that were admitted
  std::vector<Planned> planned_;  // oldest first
  int checkpoints_ = 0;
  std::int8_t checkpoint_ = -1;
  Generation decided_ = 0;                             // the newest decision that was checked
  std::vector<std::pair<Generation, int>> snapshots_;  // by generation: the newest that is whole
  bool beyond_ = false;
  std::string violation_;
};

}  // namespace dynmo::elastic
