// SPDX-License-Identifier: Apache-2.0
#pragma once

// Carries out what SizeChanges (size_changes.h) says: opens the run's door at its leader, has the
// ranks tell each other what they were asked for, empties ranks that leave, ends a group, forms the
// next one and brings every layer to where its plan wants it.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/elastic/member.h"
#include "dynmo/elastic/release_driver.h"
#include "dynmo/train/control_service.h"
#include "dynmo/train/generation.h"
#include "dynmo/train/groups.h"
#include "dynmo/train/size_changes.h"

namespace dynmo::train {

// Called by all ranks of the group in force, the same calls with equal arguments.
class Resizing {
 public:
  // Of the leader: lines for people, and events (observe/event_log.h).
  struct Tell {
    std::function<void(std::string_view)> say;
    // Of a leader that leaves: what the next one wants to know of the run. Of the next one.
    std::function<Json()> known;
    std::function<Expected<void>(const Json&)> lead;
    std::function<void(std::string_view kind, std::int64_t step, const Json&)> event;
  };
  // All outlive it.
  Resizing(Groups& groups, const Config& config, const Inputs& inputs, Tell tell)
      : groups_(groups),
        config_(config),
        inputs_(inputs),
        tell_(std::move(tell)),
        changes_(config) {}

  // Of a run's first ranks: who they are; the leader, which is the first of the group in force,
  // opens the door.
  [[nodiscard]] Expected<void> begin();
  // Of a process that joins: its part of the group that it was given a place in.
  [[nodiscard]] Expected<std::unique_ptr<GroupRun>> enter(const RunLane& lane);

  // After each step.
  void observe(const runtime::StepReport& report, const GroupRun& group);
  // Whether this rank has something to tell (RunLane::asks).
  [[nodiscard]] bool asks() const;
  // What to do before the next step; `asked`: a rank had something to tell.
  [[nodiscard]] Expected<Turn> next(const GroupRun& group, bool asked);
  // Tells who waits for a checkpoint that it is written, or why not.
  void answer_checkpoints(const GroupRun& group);
  void defer(SizeChange change) { changes_.defer(std::move(change)); }
  // Takes all layers from the ranks that leave. False: it cannot be done, and nothing has changed.
  [[nodiscard]] Expected<bool> prepare(const SizeChange& change, GroupRun& group);
  // From the group to the next one.
  struct Changed {
    std::unique_ptr<GroupRun> group;  // null: this rank has left
    bool done = false;                // not: the group in force goes on, as if nothing had been
  };
  [[nodiscard]] Expected<Changed> change(const SizeChange& change, std::unique_ptr<GroupRun> group,
                                         const RunLane& lane);
  // When the run ends: releases that no hook was called for yet are called for, in bounded time.
  [[nodiscard]] Expected<void> finish(std::int64_t step);
  // The error that a run which was stopped ends with; `finished`: how its last files went.
  [[nodiscard]] Error stopped(const Turn& turn, const GroupRun& group,
                              const Expected<void>& finished);

  [[nodiscard]] transport::Transport& group() { return groups_.group(); }
  [[nodiscard]] std::vector<int> numbers() const;  // of the ranks of the group in force
  [[nodiscard]] elastic::Member self() const;
  // Of this rank, in the newest change.
  [[nodiscard]] double pause_s() const { return pause_s_; }
  // Numbers of all ranks that were in the run are below it.
  [[nodiscard]] int members() const { return members_; }
  // Layers that were moved because of changes, since the last call.
  struct Moves {
    int count = 0;
    int layers = 0;
    Bytes bytes;
    double seconds = 0;
  };
  [[nodiscard]] Moves take_moves() { return std::exchange(moves_, {}); }

 private:
  // What a change comes to, if it does.
  struct Next {
    elastic::View view;
    plan::Plan plan;
    bool newcomers = false;
  };
  // What is said of a change once it is done.
  struct Note {
    std::string kind;  // of the event
    std::string line;
    Json more;
  };
  // Opens this rank's part of a group. `state` is what it brings, and is left with it if that
  // fails; `known` is what a rank that comes new has not.
  [[nodiscard]] Expected<std::unique_ptr<GroupRun>> open_group(
      transport::Transport& group, const RunLane& lane, Next& known, runtime::RankState& state,
      const std::optional<cost::ModelCost>& costs);
  // All ranks of the group in force hear where the next one meets, or why it does not.
  [[nodiscard]] Expected<Expected<elastic::Place>> meet(const elastic::View& next);
  [[nodiscard]] Expected<std::unique_ptr<GroupRun>> form(
      const SizeChange& change, Next& next, const elastic::Place& place, const RunLane& lane,
      runtime::RankState& state, const std::optional<cost::ModelCost>& costs);
  // The first thing that went wrong at any rank of the group in force; "": nothing.
  [[nodiscard]] Expected<std::string> first_failure(const Expected<void>& mine);
  [[nodiscard]] Expected<Changed> stay(const SizeChange& change, const std::string& why,
                                       const plan::Plan& plan, runtime::RankState state,
                                       const std::optional<cost::ModelCost>& costs,
                                       const RunLane& lane);
  // Of a leader that leaves, for the rank that leads next.
  [[nodiscard]] std::string handover();
  [[nodiscard]] Expected<void> lead(const std::string& handover);
  // `first_member`: number of the first that joins; `secret`: as ControlService::Options has it.
  [[nodiscard]] Expected<void> open_service(int first_member, const std::string& secret);
  // All ranks of the group in force hear where the next leader listens.
  [[nodiscard]] Expected<elastic::JobFile> hear_door(const elastic::View& next);
  void retire(const SizeChange& change, const std::string& line, std::int64_t step,
              const elastic::JobFile& next_door);
  void open_releases();
  // What the leader alone does of what it is asked for; the rest is for all.
  void take_own(std::vector<Wish>& wishes);
  void grow(const Wish& wish);
  void note_grown(int joined, const std::string& line);
  void give_up_growing();
  // At the leader: newcomers hear that the group which they are in is in force.
  [[nodiscard]] Expected<void> confirm(const SizeChange& change);
  // Moves to the plan now. False: a copy was not accepted.
  [[nodiscard]] Expected<bool> move(runtime::Pipeline& pipeline, const plan::Plan& plan);
  // Gives the newcomers layers, where that makes steps shorter.
  [[nodiscard]] Expected<void> spread(GroupRun& group);
  [[nodiscard]] elastic::View next_view(const SizeChange& change, int positions) const;
  void answer(process::ClientId client, const elastic::Reply& reply);
  void tell_releases(const std::vector<elastic::ReleaseNews>& news, std::int64_t step);
  [[nodiscard]] bool leads() const { return service_ != nullptr; }
  // Who is in the run and what each has, as `dynmo ctl RUN status` prints it.
  void tell_ranks(const plan::Plan& plan);

  Groups& groups_;
  const Config& config_;
  const Inputs& inputs_;
  Tell tell_;
  SizeChanges changes_;
  elastic::View view_;
  std::vector<process::ClientId> wait_for_checkpoint_;
  double pause_s_ = 0;
  int members_ = 0;
  Moves moves_;
  std::vector<Note> notes_;
  Generation tried_ = 0;  // the highest of a group that was to be
  Json status_ = Json::object();
  std::unique_ptr<ControlService> service_;  // the leader's; so is what follows
  std::optional<elastic::ReleaseDriver> releases_;
  struct Growing {  // ranks that the launcher was asked for
    process::ClientId client = 0;
    int wanted = 0;
    int joined = 0;
    std::chrono::steady_clock::time_point until = {};
  };
  std::optional<Growing> growing_;
};

// What a process needs in common with those of a run (elastic::check_same).
[[nodiscard]] elastic::Build this_build(const Config& config, const Inputs& inputs);

}  // namespace dynmo::train
