// SPDX-License-Identifier: Apache-2.0
#pragma once

// The change from one group of an elastic run to the next. The ranks of the current group form the
// next one beside it, with the newcomers. They move each layer to its new rank. Then they either
// commit to the next group or keep the current one (docs/decisions/016-the-old-group-decides.md).

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/elastic/leader.h"
#include "dynmo/elastic/size_changes.h"
#include "dynmo/train/generation.h"

namespace dynmo::train {

// Makes the event of layers that moved because of a change of size. `report` comes from
// Pipeline::rebalance or vacate.
[[nodiscard]] elastic::BoundaryEvent move_event(const runtime::StepReport& report,
                                                const std::string& cause, const plan::Plan& plan);

// The result of an attempt to change the group.
struct Regrouped {
  std::unique_ptr<GroupRun> group = nullptr;  // null: this rank has left
  double pause_s = 0;                         // of the change, without the moves
  double moving_s = 0;
  elastic::BoundaryEvents events = {};
};

// Forms the next group of a run, on one rank. All ranks of the current group make the same calls
// with equal arguments. Calls return kPeerLost if a rank is lost.
class Regrouping {
 public:
  // Refers to all arguments, which outlive it. `changes` has the state that newcomers need to make
  // the same decisions. `passage` has this rank's state if a loss interrupts a change.
  Regrouping(elastic::Groups& groups, const ResolvedRun& run, elastic::SizeChanges& changes,
             Passage& passage)
      : groups_(groups), run_(run), changes_(changes), passage_(passage) {}

  // Starts a run with its first ranks, which exchange their members.
  [[nodiscard]] Expected<void> begin();
  // Starts with the survivors of a loss, which know each other already.
  void begin(elastic::View survivors) { view_ = std::move(survivors); }
  // Opens a joining process's part of the group in which it has a place.
  [[nodiscard]] Expected<std::unique_ptr<GroupRun>> enter(const RunLane& lane);
  // Gives layers to the joining process if that pays. It is a rank when join() returns.
  [[nodiscard]] Expected<void> join(GroupRun& group);

  // Changes from the group to the next one. `leader` is that of this rank, or null if another rank
  // is the leader. It is replaced if the next group has another leader.
  [[nodiscard]] Expected<Regrouped> change(const elastic::SizeChange& change,
                                           std::unique_ptr<GroupRun> group, const RunLane& lane,
                                           std::unique_ptr<elastic::Leader>& leader);

  // Returns the members of the current group.
  [[nodiscard]] const elastic::View& view() const { return view_; }
  // Returns the highest generation of an intended group, which no other group may have.
  [[nodiscard]] Generation tried() const { return tried_; }
  // Returns true from the time this rank votes for the next group until it knows that all did.
  [[nodiscard]] bool is_taking() const { return taking_; }

 private:
  // One attempt to change the group.
  struct Try {
    const elastic::SizeChange& change;
    const RunLane& lane;
    elastic::Leader* leader = nullptr;  // of this rank; null if another rank is the leader
    std::chrono::steady_clock::time_point begin = {};
    std::int64_t step = 0;
    plan::Plan before;
    plan::Plan plan;
    elastic::View view;
    bool moves_lead = false;
    Json handover = nullptr;                       // if the next leader is another rank
    std::unique_ptr<elastic::Leader> next_leader;  // of this rank, if it is the next leader
    Regrouped result = {};
  };
  [[nodiscard]] Try begin_try(const elastic::SizeChange& change, const RunLane& lane,
                              elastic::Leader* leader);
  // Tells all ranks of the current group the meeting place of the next one, or why there is none.
  // The next leader also receives the leader's handover.
  [[nodiscard]] Expected<Expected<elastic::Place>> meet(Try& attempt);
  // Forms the next group, on a rank that stays.
  [[nodiscard]] Expected<void> form(Try& attempt, const elastic::Place& place);
  // Exchanges `mine` with all ranks of the current group. Returns the first fault of the next
  // group, or "". If the leader changes, sets `next` to the endpoint of the next leader.
  [[nodiscard]] Expected<std::string> vote(const Try& attempt, const Expected<void>& mine,
                                           elastic::JobFile& next);
  [[nodiscard]] Expected<Regrouped> commit(Try& attempt, std::unique_ptr<elastic::Leader>& leader,
                                           const elastic::JobFile& next);
  [[nodiscard]] Expected<Regrouped> stay(Try& attempt, const std::string& why);
  void leave(Try& attempt, std::unique_ptr<elastic::Leader>& leader, const elastic::JobFile& next,
             const std::string& line);
  // Forms this rank's part of a group. `view` and `plan` are the group's. A newcomer, which has
  // none, receives them. Returns a line for the user about the group's hosts, or "".
  [[nodiscard]] Expected<std::string> open_group(transport::Transport& group, const RunLane& lane,
                                                 elastic::View& view, plan::Plan& plan);
  // Gives layers to the newcomers if the controller finds that it pays.
  [[nodiscard]] static Expected<void> spread(GroupRun& group, Regrouped& result);
  // Tells newcomers, on the leader, that their group is in force.
  [[nodiscard]] Expected<void> confirm(const elastic::SizeChange& change);

  elastic::Groups& groups_;
  const ResolvedRun& run_;
  elastic::SizeChanges& changes_;
  Passage& passage_;
  elastic::View view_;
  bool taking_ = false;
  Generation tried_ = 0;
};

}  // namespace dynmo::train
