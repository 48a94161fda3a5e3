// SPDX-License-Identifier: Apache-2.0
#pragma once

// The work of a rank of an elastic run between two steps. It exchanges the requests to all ranks,
// and lets SizeChanges (elastic/size_changes.h) decide. It moves layers away from ranks that leave,
// and changes from one group to the next (regrouping.h).

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/elastic/leader.h"
#include "dynmo/elastic/size_changes.h"
#include "dynmo/observe/run_history.h"
#include "dynmo/train/generation.h"
#include "dynmo/train/regrouping.h"
#include "dynmo/train/setup/leader_options.h"

namespace dynmo::train {

// The changes of a run's ranks, on one rank. All ranks of the current group make the same calls
// with equal arguments. Calls return kPeerLost if a rank is lost.
class Elasticity {
 public:
  // Refers to all arguments, which outlive it.
  Elasticity(elastic::Groups& groups, const ResolvedRun& run, Passage& passage)
      : groups_(groups),
        run_(run),
        changes_(size_options(run.config())),
        regrouping_(groups, run, changes_, passage) {}

  // Starts a run with its first ranks. The first of them is the leader, which opens the control
  // endpoint.
  [[nodiscard]] Expected<void> begin();
  // Starts again with the ranks that have survived a loss, in their new group. `led` is the leader
  // object of a rank that was leader before the loss. Its clients are told to ask again.
  // `next_member` is the lowest unused member number.
  [[nodiscard]] Expected<void> begin_again(const elastic::View& survivors,
                                           std::unique_ptr<elastic::Leader> led, int next_member);
  // The decisions about the number of ranks, which outlive a loss in part.
  [[nodiscard]] elastic::SizeChanges& changes() { return changes_; }
  // Returns the leader object, which outlives a loss, if this rank is the leader.
  [[nodiscard]] std::unique_ptr<elastic::Leader> take_leader() { return std::move(leader_); }
  // Opens a joining process's part of the group in which it has a place. It is a rank of the run
  // once join() has returned.
  [[nodiscard]] Expected<std::unique_ptr<GroupRun>> enter(const RunLane& lane);
  [[nodiscard]] Expected<void> join(GroupRun& group);

  // Observes a step. Call it after each step. `run` is the history of the run if this rank is the
  // leader.
  void observe(const runtime::StepReport& report, const GroupRun& group,
               const observe::RunHistory& run);
  // Returns whether this rank has a request or news for all ranks (RunLane::asks).
  [[nodiscard]] bool asks() const;
  // Returns the action before the next step. `asked` is true if asks() was true on a rank.
  [[nodiscard]] Expected<elastic::BoundaryDecision> next(GroupRun& group, bool asked);
  void defer(elastic::SizeChange change) { changes_.defer(std::move(change)); }
  // Defers a change by which the leader leaves while one of its hooks runs, and returns true. The
  // hook's release would be lost with it. Meanwhile no other hook is called.
  [[nodiscard]] Expected<bool> waits_for_hook(const elastic::SizeChange& change);
  // Answers clients that wait for a checkpoint, unless one is in progress.
  void answer_checkpoints(const GroupRun& group);
  // Moves all layers away from the ranks that leave. Returns false if that is impossible, and then
  // nothing has changed.
  [[nodiscard]] Expected<bool> prepare(const elastic::SizeChange& change, GroupRun& group);
  // Changes from the group to the next one.
  [[nodiscard]] Expected<Regrouped> change(const elastic::SizeChange& change,
                                           std::unique_ptr<GroupRun> group, const RunLane& lane);
  // Stops the run and returns its error. `finished` is the result of writing its last files.
  [[nodiscard]] Error stop(const elastic::BoundaryDecision& decision, const GroupRun& group,
                           const Expected<void>& finished);
  // Ends the run. Calls the hook for the remaining releases, in bounded time.
  [[nodiscard]] Expected<void> finish();

  // Calls `write` for each event since the last call. Then answers the event's client, which may
  // read it.
  void tell_events(const std::function<void(const elastic::BoundaryEvent&)>& write);

  // Returns whether a loss now would make it unclear which ranks are in the run.
  [[nodiscard]] bool is_changing() const { return regrouping_.is_taking(); }
  [[nodiscard]] bool leads() const { return leader_ != nullptr; }
  // Returns Leader::take_failed_starts(), or 0 if another rank leads.
  [[nodiscard]] int take_failed_starts() { return leads() ? leader_->take_failed_starts() : 0; }
  [[nodiscard]] transport::Transport& group() { return groups_.group(); }
  // Returns the members of the current group.
  [[nodiscard]] const elastic::View& view() const { return regrouping_.view(); }
  [[nodiscard]] elastic::Member self() const;
  // Returns the highest generation of an intended group.
  [[nodiscard]] Generation tried() const { return regrouping_.tried(); }

 private:
  void add(elastic::BoundaryEvents events);
  [[nodiscard]] const config::Config& config() const { return run_.config(); }

  elastic::Groups& groups_;
  const ResolvedRun& run_;
  elastic::SizeChanges changes_;
  Regrouping regrouping_;
  std::unique_ptr<elastic::Leader> leader_;  // null where another rank leads
  elastic::BoundaryEvents events_;
};

}  // namespace dynmo::train
