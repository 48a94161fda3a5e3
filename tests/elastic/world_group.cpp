// SPDX-License-Identifier: Apache-2.0
// What the members of a world compute and hold, and what must hold of it.
#include <fmt/format.h>

#include <algorithm>

#include "tests/elastic/world.h"

namespace dynmo::elastic {
namespace {

using Main = Node::Main;

const Copy* find_copy(const Node& node, int layer, int step) {
  for (const Copy& copy : node.copies) {
    if (copy.layer == layer && copy.step == step) return &copy;
  }
  return nullptr;
}

const Copy* find_copy(const Node& node, int layer, int step, CopyKind kind) {
  for (const Copy& copy : node.copies) {
    if (copy.layer == layer && copy.step == step && copy.kind == kind) return &copy;
  }
  return nullptr;
}

bool is_snapshot(CopyKind kind) { return kind == CopyKind::kOwn || kind == CopyKind::kNeighbour; }

void add_copy(Node& node, const Copy& copy) {
  for (const Copy& held : node.copies) {
    const bool same = held.layer == copy.layer && held.step == copy.step && held.kind == copy.kind;
    if (same) return;
  }
  node.copies.push_back(copy);
}

int owner(const View& view, int layer, int layers) { return layer * view.size() / layers; }

// The layer that moves from the first rank to the second.
int moved_layer(const View& view, int layers) {
  int layer = -1;
  while (layer + 1 < layers && owner(view, layer + 1, layers) == 0) ++layer;
  return layer;
}

}  // namespace

bool World::wants(const View& view, int a, int layer) const {
  const auto rank = view.rank_of(node(a).membership().self.id);
  return rank && (options_.replicas || owner(view, layer, options_.layers) == rank->value);
}

const View& World::view_of(int a) const {
  const Membership& m = node(a).membership();
  if (m.phase == Phase::kForming) return m.forming->view;
  const bool newcomer = m.standing.installed.generation == 0 && !m.standing.attempts.empty();
  return newcomer ? m.standing.attempts.front() : m.standing.installed;
}

Report World::report_of(int a) const {
  const Node& mine = node(a);
  Report report{
      .member = mine.membership().self, .step = mine.step, .gradients_complete = mine.complete};
  if (mine.updated == mine.step) report.updated = UpdateRecord{.step = mine.updated - 1};
  for (const Copy& copy : mine.copies) {
    report.holdings.push_back({.layer = LayerId(copy.layer), .step = copy.step, .kind = copy.kind});
  }
  if (checkpoint_ >= 0) report.checkpoint = checkpoint_;
  return report;
}

// Whether everything that `a` needs is with somebody who forms the same view.
bool World::can_restore(int a) const {
  const Node& mine = node(a);
  if (mine.main != Main::kRestoring || mine.membership().phase != Phase::kForming) return false;
  const Form& form = *mine.membership().forming;
  for (int layer = 0; layer < options_.layers; ++layer) {
    if (form.decision.origin != Origin::kMemory) continue;
    if (!wants(form.view, a, layer)) continue;
    bool found = false;
    bool held = false;  // or missing for good: then restoring says so
    for (const Member& member : form.view.members) {
      const int b = node_of(member.id);
      const Node& other = node(b);
      const bool forms =
          b == a || (acts(b) && reach(a, b) && other.membership().phase == Phase::kForming &&
                     other.membership().forming->ballot == form.ballot);
      const bool finishes = form.decision.finish && other.complete &&
                            find_copy(other, layer, static_cast<int>(form.decision.step) - 1,
                                      CopyKind::kLive) != nullptr;
      const bool has_it = find_copy(other, layer, static_cast<int>(form.decision.step)) != nullptr;
      found = found || (forms && (has_it || (b == a && finishes)));
      held = held || !forms || has_it || finishes;
    }
    if (!found && held) return false;
  }
  return true;
}

// Rolls back, or finishes the update, in place; fetches what is missing; says that it is there.
void World::restore(int a) {
  Node& mine = edit(a);
  const Form& form = *mine.membership().forming;
  const std::int8_t step = small(form.decision.step);
  if (form.decision.finish && mine.complete && mine.step + 1 == step) {
    for (Copy& copy : mine.copies) {
      if (copy.kind == CopyKind::kLive) ++copy.step, ++copy.token;
    }
    mine.updated = step;
  }
  std::vector<Copy> live;
  for (int layer = 0; layer < options_.layers; ++layer) {
    if (!wants(form.view, a, layer)) continue;
    Copy got{.layer = small(layer), .step = step, .token = step};
    if (form.decision.origin == Origin::kMemory) {
      const Copy* found = find_copy(mine, layer, step);
      for (const Member& member : form.view.members) {
        const int b = node_of(member.id);
        if (found == nullptr && acts(b) && reach(a, b)) found = find_copy(node(b), layer, step);
      }
      if (found == nullptr) return violate(fmt::format("{} has no source of layer {}", a, layer));
      got.token = found->token;
    }
    live.push_back(got);
  }
  std::erase_if(mine.copies, [&](const Copy& copy) {
    return copy.kind == CopyKind::kLive && copy.step != step;
  });
  for (Copy& copy : mine.copies) {
    if (copy.kind == CopyKind::kLive) copy.kind = CopyKind::kShadow;
    copy.fetched = false;
  }
  mine.copies.insert(mine.copies.begin(), live.begin(), live.end());
  mine.step = mine.first_step = step;
  mine.complete = false;
  if (mine.updated != step) mine.updated = -1;
  mine.main = Main::kArrived;
  mine.done_group = small(form.view.generation);
  mine.done_step = -1;
}

bool World::can_commit(int a) const {
  const Membership& m = node(a).membership();
  if (node(a).main != Main::kArrived || m.phase != Phase::kForming) return false;
  const auto& members = m.forming->view.members;
  return std::all_of(members.begin(), members.end(), [&](const Member& member) {
    const int b = node_of(member.id);
    return reach(a, b) && node(b).done_group == m.forming->view.generation;
  });
}

void World::commit(int a) {
  Node& mine = edit(a);
  const View& view = mine.membership().standing.installed;
  mine.group = small(view.generation);
  mine.applied = false;
  if (mine.main == Main::kRunning) use_fetched(a);  // a planned change
  if (mine.main == Main::kArrived) {
    std::erase_if(mine.copies, [](const Copy& copy) { return copy.kind == CopyKind::kShadow; });
  }
  mine.main = Main::kRunning;
  const bool all = std::all_of(view.members.begin(), view.members.end(), [&](const Member& one) {
    const Node& other = node(node_of(one.id));
    return other.up && other.group == mine.group && other.step == mine.step && !other.complete;
  });
  if (all) check_layers(view);
}

bool World::can_complete(int a) const {
  const Node& mine = node(a);
  const View& view = mine.membership().standing.installed;
  if (mine.main != Main::kRunning || mine.complete || mine.step >= options_.steps) return false;
  if (change_of(a) != nullptr || mine.group != view.generation) return false;
  if ((role_in_move(a) != 0 && !mine.applied)) return false;
  return std::all_of(view.members.begin(), view.members.end(), [&](const Member& member) {
    const int b = node_of(member.id);
    const Node& other = node(b);
    const bool done = other.done_group == mine.group && other.done_step >= mine.step;
    const bool works = acts(b) && other.main == Main::kRunning && other.group == mine.group &&
                       other.step == mine.step && (role_in_move(b) == 0 || other.applied);
    return reach(a, b) && (done || works);
  });
}

void World::complete(int a) {
  Node& mine = edit(a);
  const View& view = mine.membership().standing.installed;
  mine.complete = true;
  mine.done_group = mine.group;
  mine.done_step = mine.step;
  const bool due = mine.step == mine.first_step || mine.step % options_.snapshot_every == 0;
  if (!due || options_.replicas || view.size() < 2) return;
  if (!options_.keep_slots) {
    std::erase_if(mine.copies, [&](const Copy& copy) {
      return is_snapshot(copy.kind) && copy.step < mine.step;
    });
  }
  const int me = view.rank_of(mine.membership().self.id)->value;
  const Node& before = node(node_of(view.members[idx((me + view.size() - 1) % view.size())].id));
  const auto take = [&](const std::vector<Copy>& copies, CopyKind kind) {
    for (Copy copy : copies) {
      if (copy.kind != CopyKind::kLive || copy.step != mine.step) continue;
      copy.kind = kind;
      add_copy(mine, copy);
    }
  };
  take(before.copies, CopyKind::kNeighbour);
  take(std::vector<Copy>(mine.copies), CopyKind::kOwn);
}

bool World::can_update(int a) const {
  const Node& mine = node(a);
  const auto& members = mine.membership().standing.installed.members;
  if (!mine.complete || mine.group == 0 || mine.main != Main::kRunning) return false;
  return std::all_of(members.begin(), members.end(), [&](const Member& member) {
    const int b = node_of(member.id);
    return reach(a, b) && node(b).done_group == mine.group && node(b).done_step >= mine.step;
  });
}

void World::update(int a) {
  Node& mine = edit(a);
  const bool due = mine.step == mine.first_step || mine.step % options_.snapshot_every == 0;
  std::erase_if(mine.copies, [&](const Copy& copy) {
    return copy.kind == CopyKind::kShadow ||
           (due && is_snapshot(copy.kind) && copy.step < mine.step);
  });
  for (Copy& copy : mine.copies) {
    if (copy.kind != CopyKind::kLive) continue;
    if (copy.token != mine.step) violate(fmt::format("{} computes with a wrong layer", a));
    ++copy.step, ++copy.token;
  }
  if (due) {
    const std::pair<Generation, int> whole{mine.group, mine.step};
    std::erase_if(snapshots_, [&](const auto& one) { return one.first <= whole.first; });
    snapshots_.push_back(whole);
  }
  mine.updated = ++mine.step;
  mine.complete = false;
}

bool World::has_move(int a) const {
  const Node& mine = node(a);
  const View& view = mine.membership().standing.installed;
  return options_.moves && !options_.replicas && view.size() >= 2 &&
         mine.step == mine.first_step + 1 && moved_layer(view, options_.layers) >= 0;
}

int World::role_in_move(int a) const {
  if (!has_move(a)) return 0;
  const int rank =
      node(a).membership().standing.installed.rank_of(node(a).membership().self.id)->value;
  return rank == 0 ? 1 : rank == 1 ? 2 : 0;
}

// Whether the receiver of the move has the layer, in the view of `a`.
bool World::taken(int a) const {
  const View& view = node(a).membership().standing.installed;
  const Node& taker = node(node_of(view.members[1].id));
  const int layer = moved_layer(view, options_.layers);
  const bool has = std::any_of(taker.copies.begin(), taker.copies.end(), [&](const Copy& copy) {
    return copy.layer == layer && copy.step == node(a).step && !is_snapshot(copy.kind);
  });
  return has && taker.group == node(a).group && taker.step == node(a).step;
}

void World::add_work(int a, std::vector<Happening>& all) const {
  const Node& mine = node(a);
  const auto add = [&](Kind kind, bool can) {
    if (can) all.push_back({kind, small(a), 0});
  };
  add(Kind::kRest, mine.main == Main::kStopping);
  add(Kind::kRestore, can_restore(a));
  add(Kind::kCommit, can_commit(a));
  add(Kind::kComplete, can_complete(a));
  add(Kind::kUpdate, can_update(a));
  if (mine.main == Main::kRunning && role_in_move(a) != 0 && !mine.applied) {
    const View& view = mine.membership().standing.installed;
    const int giver = node_of(view.members[0].id);
    const Node& other = node(giver);
    const bool both = acts(giver) && reach(a, giver) && other.group == mine.group &&
                      other.step == mine.step && other.main == Main::kRunning;
    add(Kind::kCopyMoved, role_in_move(a) == 2 && both && !taken(a));
    add(Kind::kApplyMove, taken(a));
  }
  const auto& members = mine.membership().standing.installed.members;
  const bool aligned = std::all_of(members.begin(), members.end(), [&](const Member& member) {
    const Node& other = node(node_of(member.id));
    return other.up && other.group == mine.group && other.step == mine.step && !other.complete;
  });
  add(Kind::kCheckpoint, checkpoints_ < options_.checkpoints && mine.main == Main::kRunning &&
                             mine.step > checkpoint_ && aligned &&
                             mine.known->leader == mine.membership().self.id);
  add(Kind::kFail, options_.failures && broken(a));
}

// Whether the group of `a` cannot work, which it has not told.
bool World::broken(int a) const {
  const Node& mine = node(a);
  const bool forms = mine.membership().phase == Phase::kForming;
  const View& view = view_of(a);
  return mine.failed < view.generation && (forms || mine.main == Main::kRunning) &&
         std::any_of(view.members.begin(), view.members.end(), [&](const Member& member) {
           const int b = node_of(member.id);
           return !reach(a, b) || !node(b).up ||
                  node(b).membership().promised.number > view.generation;
         });
}

// Where nothing else happens, whoever waits for others to form a group gives up.
bool World::times_out(int a) const {
  const Membership& m = node(a).membership();
  const bool newcomer = m.phase == Phase::kRun && m.standing.installed.generation == 0;
  const bool waits = m.phase == Phase::kForming || newcomer;
  return (waits && node(a).failed < view_of(a).generation) || broken(a);
}

// Before a planned change nobody has begun the step that its leader does not begin.
bool World::between_steps(int a) const {
  const Node& mine = node(a);
  return !has_move(a) && std::none_of(nodes_.begin(), nodes_.end(), [&](const auto& other) {
    return other->done_group == mine.group && other->done_step >= mine.step;
  });
}

// Moves are small enough to be here whole: what is copied, and what becomes of both copies.
void World::apply_move(int a, Kind kind) {
  Node& mine = edit(a);
  const View& view = mine.membership().standing.installed;
  const int layer = moved_layer(view, options_.layers);
  if (kind == Kind::kCopyMoved) {
    for (Copy copy : node(node_of(view.members[0].id)).copies) {
      if (copy.layer != layer || copy.kind != CopyKind::kLive) continue;
      copy.kind = CopyKind::kShadow;
      return add_copy(mine, copy);
    }
    return violate("the layer that moves is not where it was");
  }
  mine.applied = true;
  const bool gives = role_in_move(a) == 1;
  for (Copy& copy : mine.copies) {
    if (copy.layer != layer || copy.step != mine.step || is_snapshot(copy.kind)) continue;
    copy.kind = gives ? CopyKind::kShadow : CopyKind::kLive;
  }
  if (gives && !options_.keep_shadows) {
    std::erase_if(mine.copies, [](const Copy& copy) { return copy.kind == CopyKind::kShadow; });
  }
}

void World::calm() {
  options_.faults = faults_;
  options_.changes = changes_;
  for (int a = 0; a < size(); ++a) edit(a).stopped = false;
  apply({Kind::kHeal});
}

bool World::retries() const {
  for (int a = 0; a < size(); ++a) {
    if (acts(a) && times_out(a)) return true;
    if (acts(a) && !memberships_->handled(node(a).known, Retry{}).actions.empty()) return true;
  }
  return false;
}

void World::check_at_rest() {
  for (int a = 0; a < size(); ++a) {
    const Node& mine = node(a);
    if (!mine.up) continue;
    for (int b = 0; b < size(); ++b) {
      if (node(b).up && (node(b).stopped || !reach(a, b))) return;  // somebody is waited for
    }
    const Membership& m = mine.membership();
    bool whole = m.phase == Phase::kRun && m.standing.installed.generation > 0;
    for (const Member& member : mine.membership().standing.installed.members) {
      const Node& other = node(node_of(member.id));
      whole = whole && other.up && other.group == mine.group;
    }
    if (!whole) violate(fmt::format("{} waits for nobody", a));
    if (mine.step < options_.steps) violate(fmt::format("{} is stuck in step {}", a, mine.step));
  }
}

// At most one view can run: all of its members are there and have installed it, or are about to.
void World::check_runs() {
  const View* running = nullptr;
  for (const auto& at : nodes_) {
    const Node& one = *at;
    if (!one.up || one.membership().phase != Phase::kRun) continue;
    const View& view = one.membership().standing.installed;
    if (view.generation == 0) continue;
    const bool runs = std::all_of(view.members.begin(), view.members.end(), [&](const Member& m) {
      const Node& other = node(node_of(m.id));
      const Membership& theirs = other.membership();
      const bool installed =
          theirs.phase == Phase::kRun && theirs.standing.installed.generation == view.generation;
      const bool about_to = theirs.phase == Phase::kForming && other.main == Main::kArrived &&
                            theirs.forming->view.generation == view.generation;
      const auto& tried = theirs.standing.attempts;
      const bool newcomer = theirs.standing.installed.generation == 0;
      const bool agreed = theirs.phase == Phase::kRun && !tried.empty() && tried.back() == view &&
                          (newcomer ? other.voted : other.heard) == view.generation;
      return other.up && (installed || about_to || agreed);
    });
    if (!runs) continue;
    if (running != nullptr && *running != view) {
      violate(fmt::format("views {} and {} both run", running->generation, view.generation));
    }
    running = &view;
  }
}

// Every layer is where the plan has it, once, at the step of its owner, with the right content.
void World::check_layers(const View& view) {
  std::vector<int> owners(idx(options_.layers));
  for (const Member& member : view.members) {
    const Node& one = node(node_of(member.id));
    for (const Copy& copy : one.copies) {
      if (copy.kind != CopyKind::kLive) continue;
      ++owners[idx(copy.layer)];
      if (copy.step != one.step || copy.token != one.step) {
        violate(fmt::format("{} begins with a wrong layer {}", member.number, copy.layer));
      }
    }
  }
  for (const int count : owners) {
    if (count != (options_.replicas ? view.size() : 1)) violate("a layer has not one owner");
  }
}

// Nothing newer was there among those who go on, and what should have been there was.
void World::check_decision(int a, const Form& form) {
  if (form.ballot.number <= decided_) return;
  decided_ = form.ballot.number;
  int best = checkpoint_;
  const auto& members = form.view.members;
  const auto any = [&](const auto& holds) {
    return std::any_of(members.begin(), members.end(),
                       [&](const Member& one) { return holds(node(node_of(one.id))); });
  };
  for (int step = 0; step <= options_.steps; ++step) {
    const bool updated = any([&](const Node& one) { return one.updated == step; });
    bool all = true;
    for (int layer = 0; layer < options_.layers; ++layer) {
      all = all && any([&](const Node& one) {
              const bool finishes = updated && one.complete && one.step == step - 1 &&
                                    find_copy(one, layer, step - 1, CopyKind::kLive) != nullptr;
              return find_copy(one, layer, step) != nullptr || finishes;
            });
    }
    if (all) best = std::max(best, step);
  }
  const auto step = form.decision.step;
  if (step != std::max(best, 0)) {
    violate(fmt::format("{} decides for step {}, and {} was there", a, step, best));
  }
  if (form.before.size() != 1) return;
  const View& last = form.before.front();
  const auto missing = std::count_if(last.members.begin(), last.members.end(),
                                     [&](const auto& m) { return !form.view.has(m.id); });
  const bool all_before = std::all_of(last.members.begin(), last.members.end(), [&](const auto& m) {
    return step < node(node_of(m.id)).step;
  });
  if (missing == 0 && all_before)
    violate(fmt::format("nobody is missing, and it goes back to {}", step));
  for (const auto& [generation, whole] : snapshots_) {
    const bool lost = form.decision.origin == Origin::kInitial || step < whole;
    if (missing == 1 && generation == last.generation && lost) {
      violate(fmt::format("one is missing, and the snapshot of step {} does not help", whole));
    }
  }
}

}  // namespace dynmo::elastic
