// SPDX-License-Identifier: Apache-2.0
#pragma once

// The work of a rank of an elastic run between two steps: it exchanges what the ranks are asked
// for, has SizeChanges (elastic/size_changes.h) decide, moves layers away from ranks that leave and
// passes from one group to the next (regrouping.h).

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/elastic/boundary_event.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/elastic/leader.h"
#include "dynmo/elastic/size_changes.h"
#include "dynmo/observe/run_history.h"
#include "dynmo/train/generation.h"
#include "dynmo/train/regrouping.h"
#include "dynmo/train/setup/leader_options.h"

namespace dynmo::train {

// Called by all ranks of the group in force, the same calls with equal arguments.
class Elasticity {
 public:
  // All outlive it.
  Elasticity(elastic::Groups& groups, const config::Config& config, const Inputs& inputs)
      : groups_(groups),
        config_(config),
        inputs_(inputs),
        changes_(size_options(config)),
        regrouping_(groups, config, inputs, changes_) {}

  // Called by a run's first ranks. The first of them leads: it opens the control endpoint.
  [[nodiscard]] Expected<void> begin();
  // Called by those that have survived a loss, in the group that they have formed. `led`: of a rank
  // that has led before the loss; its clients are told to ask again. `next_member`: the lowest
  // number that no rank had.
  [[nodiscard]] Expected<void> begin_again(const elastic::View& survivors,
                                           std::unique_ptr<elastic::Leader> led, int next_member);
  // The leader outlives a loss, where this rank leads.
  [[nodiscard]] std::unique_ptr<elastic::Leader> take_leader() { return std::move(leader_); }
  // Called by a process that joins: opens its part of the group in which it was given a place. It
  // is a rank of the run once join() has returned.
  [[nodiscard]] Expected<std::unique_ptr<GroupRun>> enter(const RunLane& lane);
  [[nodiscard]] Expected<void> join(GroupRun& group);

  // Called after each step. `run` is the history of the run where this rank leads.
  void observe(const runtime::StepReport& report, const GroupRun& group,
               const observe::RunHistory& run);
  // Whether this rank has something to tell (RunLane::asks).
  [[nodiscard]] bool asks() const;
  // Returns what to do before the next step; `asked`: a rank had something to tell.
  [[nodiscard]] Expected<elastic::BoundaryDecision> next(GroupRun& group, bool asked);
  void defer(elastic::SizeChange change) { changes_.defer(std::move(change)); }
  // Answers who waits for a checkpoint, unless one is under way.
  void answer_checkpoints(const GroupRun& group);
  // Takes all layers from the ranks that leave. False: it cannot be done, and nothing has changed.
  [[nodiscard]] Expected<bool> prepare(const elastic::SizeChange& change, GroupRun& group);
  // From the group to the next one.
  [[nodiscard]] Expected<Regrouped> change(const elastic::SizeChange& change,
                                           std::unique_ptr<GroupRun> group, const RunLane& lane);
  // The run was stopped: the error that it ends with. `finished`: how its last files went.
  [[nodiscard]] Error stop(const elastic::BoundaryDecision& decision, const GroupRun& group,
                           const Expected<void>& finished);
  // The run ends: releases that no hook was called for yet are called for, in bounded time.
  [[nodiscard]] Expected<void> finish();

  // A loss has ended a change: what the rank had in it; nothing where none was under way.
  [[nodiscard]] runtime::RankState take_state() { return regrouping_.take_state(); }
  // Has each event since the last call written, and then answers its client, who may read it.
  void tell_events(const std::function<void(const elastic::BoundaryEvent&)>& write);

  // Whether a loss now leaves it unclear which ranks are in the run.
  [[nodiscard]] bool is_changing() const { return regrouping_.is_taking(); }
  [[nodiscard]] bool leads() const { return leader_ != nullptr; }
  [[nodiscard]] transport::Transport& group() { return groups_.group(); }
  // The members of the group in force.
  [[nodiscard]] const elastic::View& view() const { return regrouping_.view(); }
  [[nodiscard]] elastic::Member self() const;

 private:
  void add(elastic::BoundaryEvents events);

  elastic::Groups& groups_;
  const config::Config& config_;
  const Inputs& inputs_;
  elastic::SizeChanges changes_;
  Regrouping regrouping_;
  std::unique_ptr<elastic::Leader> leader_;  // null where another rank leads
  elastic::BoundaryEvents events_;
};

}  // namespace dynmo::train
