// SPDX-License-Identifier: Apache-2.0
#pragma once

// How one group of an elastic run follows another: the ranks of the group in force meet, form the
// next one beside it with the newcomers, bring every layer to where its plan wants it, and then
// either commit to the next group or stay in the one they have
// (docs/decisions/016-the-old-group-decides.md).

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/elastic/boundary_event.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/elastic/leader.h"
#include "dynmo/elastic/size_changes.h"
#include "dynmo/train/generation.h"

namespace dynmo::train {

// Makes the event of layers that were moved because of a change of size, from a report of
// Pipeline::rebalance or vacate.
[[nodiscard]] elastic::BoundaryEvent move_event(const runtime::StepReport& report,
                                                const std::string& cause, const plan::Plan& plan);

// The result of a try to change the group.
struct Regrouped {
  std::unique_ptr<GroupRun> group = nullptr;  // null: this rank has left
  bool done = false;   // else the group in force goes on, as if nothing had been
  double pause_s = 0;  // that the change took, without the moves
  double moving_s = 0;
  elastic::BoundaryEvents events = {};
};

// Called by all ranks of the group in force, the same calls with equal arguments.
class Regrouping {
 public:
  // All outlive it. `changes`: what newcomers have to decide alike.
  Regrouping(elastic::Groups& groups, const config::Config& config, const Inputs& inputs,
             elastic::SizeChanges& changes)
      : groups_(groups), config_(config), inputs_(inputs), changes_(changes) {}

  // Called by a run's first ranks: they learn who they are.
  [[nodiscard]] Expected<void> begin();
  // Instead, by those that have survived a loss: they know who they are.
  void begin(elastic::View survivors) { view_ = std::move(survivors); }
  // Called by a process that joins: opens its part of the group in which it was given a place.
  [[nodiscard]] Expected<std::unique_ptr<GroupRun>> enter(const RunLane& lane);
  // Then it gets layers, where that pays, and is a rank when this returns.
  [[nodiscard]] Expected<void> join(GroupRun& group);

  // From the group to the next one. `leader` is that of this rank, null where another one leads; it
  // is replaced where the lead moves.
  [[nodiscard]] Expected<Regrouped> change(const elastic::SizeChange& change,
                                           std::unique_ptr<GroupRun> group, const RunLane& lane,
                                           std::unique_ptr<elastic::Leader>& leader);

  // A loss has ended a change, and its groups: what this rank has taken into it; nothing where none
  // was under way.
  [[nodiscard]] runtime::RankState take_state();

  // The members of the group in force.
  [[nodiscard]] const elastic::View& view() const { return view_; }
  // From when this rank says that it takes the next group until it knows that all do.
  [[nodiscard]] bool is_taking() const { return taking_; }

 private:
  // The values that a rank takes from one group to the next.
  struct Held {
    runtime::RankState state;
    std::optional<control::Controller> controller = {};  // as the group in force has it
  };
  // One try to change the group.
  struct Try {
    const elastic::SizeChange& change;
    const RunLane& lane;
    elastic::Leader* leader = nullptr;  // this rank's; null where another one leads
    std::chrono::steady_clock::time_point begin = {};
    std::int64_t step = 0;
    plan::Plan before;
    plan::Plan plan;
    elastic::View view;
    bool moves_lead = false;
    Json handover = nullptr;                       // where the lead moves
    std::unique_ptr<elastic::Leader> next_leader;  // this rank, where it leads next
    Regrouped result = {};
  };
  [[nodiscard]] Try begin_try(const elastic::SizeChange& change, const RunLane& lane,
                              elastic::Leader* leader);
  // All ranks of the group in force hear where the next one meets, or why it does not; the next
  // leader hears what the leader knows.
  [[nodiscard]] Expected<Expected<elastic::Place>> meet(Try& attempt);
  // Makes `forming_`, at a rank that stays.
  [[nodiscard]] Expected<void> form(Try& attempt, const elastic::Place& place);
  // All ranks of the group in force hear whether the next one works at each: the first fault; "":
  // none. Where the lead moves, `next` is where the next leader listens.
  [[nodiscard]] Expected<std::string> vote(const Try& attempt, const Expected<void>& mine,
                                           elastic::JobFile& next);
  [[nodiscard]] Expected<Regrouped> commit(Try& attempt, std::unique_ptr<elastic::Leader>& leader,
                                           const elastic::JobFile& next);
  [[nodiscard]] Expected<Regrouped> stay(Try& attempt, const std::string& why);
  void leave(Try& attempt, std::unique_ptr<elastic::Leader>& leader, const elastic::JobFile& next,
             const std::string& line);
  // Holds again what `forming_` has; it ends before its transport does.
  void take_back();
  // Makes `forming_` of what is held. `view` and `plan` are the group's; a newcomer, which has
  // none, hears them. Returns a line for people about the group's hosts, or "".
  [[nodiscard]] Expected<std::string> open_group(transport::Transport& group, const RunLane& lane,
                                                 elastic::View& view, plan::Plan& plan);
  // Gives the newcomers layers, where the controller finds that it pays.
  [[nodiscard]] static Expected<void> spread(GroupRun& group, Regrouped& result);
  // At the leader: newcomers hear that the group which they are in is in force.
  [[nodiscard]] Expected<void> confirm(const elastic::SizeChange& change);

  elastic::Groups& groups_;
  const config::Config& config_;
  const Inputs& inputs_;
  elastic::SizeChanges& changes_;
  elastic::View view_;
  bool taking_ = false;
  Generation tried_ = 0;  // the highest of a group that was to be
  // Between two groups this rank's layers are in one of these, also after an error.
  Held held_;
  cost::Cluster cluster_;  // of the newest group that this rank has left; none: it has just come
  std::unique_ptr<GroupRun> forming_;
};

}  // namespace dynmo::train
