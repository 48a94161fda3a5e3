// SPDX-License-Identifier: Apache-2.0
#pragma once

// One rank of a training pipeline, bound to one group: it takes the rank's state, runs steps of
// observe → plan → simulate → apply on it, and gives it back when the group ends. Every rank
// constructs one with equal arguments and calls the same functions in the same order; all decisions
// follow from values that every rank has, so no rank waits for another's opinion.
//
// The group may be several replicas of one pipeline (transport/grid.h), which share one plan, move
// layers together and add up their gradients (runtime/reduction.h). A step has replicas x
// accumulation x micro_batches micro-batches, numbered in this order, the last one fastest.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "dynmo/control/decisions.h"
#include "dynmo/control/profiler.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/model/layer.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/runtime/background_move.h"
#include "dynmo/runtime/device_messages.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/exchange.h"
#include "dynmo/runtime/migrate.h"
#include "dynmo/runtime/pipeline_options.h"
#include "dynmo/runtime/program.h"
#include "dynmo/runtime/rank_state.h"
#include "dynmo/runtime/rank_times.h"
#include "dynmo/runtime/step_report.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/tags.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

class Pipeline {
 public:
  // A micro-batch by its number in the step.
  using Batches = std::function<MicroBatch(std::int64_t step, MicroBatchId)>;

  // Takes initial or restored states of the layers that the state's plan gives this rank of its
  // replica, and puts them on its device. Requires a plan valid for the model and the ranks of a
  // replica: transport.size() / replicas.
  Pipeline(transport::Transport& transport, model::Model model, PipelineOptions options,
           RankState state);

  // Runs the next step's schedule and leaves its gradients, summed over replicas and ties, in
  // states(); no update, no exchange.
  [[nodiscard]] Expected<StepOutput> accumulate(const Batches& batches);
  // Runs `steps` steps forward and backward without an update, so that costs are known before the
  // first step.
  [[nodiscard]] Expected<void> measure(const Batches& batches, int steps);
  // Starts from costs that another pipeline of the same model and group has measured.
  // kInfeasible (Recompute::kAuto): the plan does not fit the memory with every layer recomputed.
  [[nodiscard]] Expected<void> use(const control::Profiler& measured);
  // In a group that follows another: measures its links, and chooses with the costs known.
  [[nodiscard]] Expected<void> go_on();
  // Runs one training step, which is the three calls below.
  [[nodiscard]] Expected<StepReport> step(const Batches& batches);
  // Asks the sources, plans and moves if it pays, and runs the schedule. Afterwards the step's
  // gradients are complete on this rank.
  [[nodiscard]] Expected<void> begin_step(const Batches& batches);
  // Tells the other ranks this rank's figures of the step, and returns those of all.
  [[nodiscard]] Expected<Exchange> exchange_figures();
  // Clips, updates, and tells sources and controller the outcome. It sends nothing and needs no
  // group, so a rank whose group was lost in the exchange can finish the step with the value that
  // another rank has got. Requires gradients_complete(). Where the report says to stop, nothing has
  // changed and the step is not done. kInternal: the exchange is of another model or group.
  [[nodiscard]] Expected<StepReport> finish_step(const Exchange& exchanged);
  // Whether finish_step() is all that next_step() lacks.
  [[nodiscard]] bool gradients_complete() const { return begun_ && begun_->complete; }
  // Mean loss over a step's number of micro-batches of held-out data, forward only, shared out over
  // the replicas like those of a step.
  // kGeneration: with the decisions that layers take while a text is made.
  [[nodiscard]] Expected<double> validate(const Batches& batches,
                                          model::Pass pass = model::Pass::kValidation);
  // Decides now, not with the next step, and moves where that pays: ranks have come. The report
  // has the decision and the move only.
  [[nodiscard]] Expected<StepReport> rebalance();
  // Takes all layers from the positions that are not among `kept`, ascending; the report as above:
  // no layers moved where a copy was refused, or the ranks' memory does not suffice. kInfeasible:
  // no plan fits it; kBadInput: nothing was measured yet.
  [[nodiscard]] Expected<StepReport> vacate(const std::vector<Rank>& kept);
  // Whether positions without layers are released now (Controller::release).
  [[nodiscard]] std::optional<control::Release> release() {
    return decisions_.release(state_.plan, state_.step);
  }
  // Moves to `plan` now. False where a copy was refused and the old plan runs on.
  [[nodiscard]] Expected<bool> apply(const plan::Plan& plan);
  // Begins to move to `plan` while the next step runs under the one in force: the new plan is from
  // the step after it on, unless a copy is refused (background_move.h). Moves now, as apply() does,
  // where no layer moves, or where the memory does not hold the layers twice for a step.
  [[nodiscard]] Expected<bool> begin_move(const plan::Plan& plan);
  // The plan that is in force from the next step on: all ranks hold what it gives them.
  [[nodiscard]] const plan::Plan* coming_plan() const {
    return moving_ && moving_->agreed ? &moving_->plan : nullptr;
  }
  // Takes a snapshot before the next step (snapshot.h); not committed where a copy was refused.
  [[nodiscard]] Expected<MigrationReport> take_snapshot(std::span<const WorldRank> keepers);

  // The rank's state, for a pipeline of the next group. After an error, too: a step that was not
  // finished is forgotten, as nothing but its gradients was there. The pipeline is done with.
  [[nodiscard]] RankState take_state();

  // Costs as measured, with the frozen prefix of the next step; nullopt before anything was
  // measured.
  [[nodiscard]] std::optional<cost::ModelCost> costs() const {
    return decisions_.costs(state_.frozen_layers);
  }
  [[nodiscard]] cost::Cluster cluster() const { return decisions_.cluster(); }
  [[nodiscard]] const control::Profiler& profiler() const { return decisions_.profiler(); }
  // The newest step, as its figures went into decisions, and what sources said before it.
  [[nodiscard]] const cost::Observation& observed() const { return decisions_.observed(); }
  [[nodiscard]] cost::Announced announced() const { return decisions_.announced(); }
  [[nodiscard]] const transport::Grid& grid() const { return grid_; }
  [[nodiscard]] const plan::Plan& plan() const { return state_.plan; }
  // Layers that keep their input only, under the plan in force: chosen anew with every plan, every
  // other frozen prefix and the first costs, alike on all ranks.
  [[nodiscard]] const plan::LayerSet& recomputed() const { return program_.recomputed; }
  // All that take_state() gives back, but for the controller.
  [[nodiscard]] const RankState& state() const { return state_; }
  [[nodiscard]] const LayerStates& states() const { return state_.layers; }
  [[nodiscard]] LayerStates& states() { return state_.layers; }
  [[nodiscard]] const Staging& staging() const { return options_.staging; }  // of the states
  [[nodiscard]] std::int64_t next_step() const { return state_.step; }
  [[nodiscard]] int frozen_layers() const { return state_.frozen_layers; }
  [[nodiscard]] const model::Model& model() const { return model_; }
  [[nodiscard]] const dynamism::Sources& sources() const { return state_.sources; }
  [[nodiscard]] const MigrationReport& last_migration() const { return migration_; }

 private:
  // A step that was begun and not finished.
  struct BegunStep {
    StepReport report;
    StepOutput output = {};
    std::chrono::steady_clock::time_point start = {};
    std::chrono::steady_clock::time_point ready = {};  // to run the schedule
    bool complete = false;                             // its gradients
  };
  // A move under a step.
  struct Moving {
    plan::Plan plan;
    plan::LayerSet recomputed;
    int layers = 0;
    Bytes bytes;
    MigrationReport report = {};
    BackgroundMove transfer;
    bool agreed = false;  // all ranks hold what was sent, as it is after the step
  };
  enum class Moves { kNow, kDuringStep };
  [[nodiscard]] transport::Tag control(transport::Control use) const;
  [[nodiscard]] control::Decisions::Now now() const;
  // Makes the input that the rounds of a step have in common with those of validation.
  [[nodiscard]] StepInput round_input(const schedule::Schedule& lowered, const Batches& batches,
                                      int round) const;
  [[nodiscard]] Expected<StepOutput> run_round(const StepInput& input);
  [[nodiscard]] dynamism::Boundary boundary();
  [[nodiscard]] Expected<std::vector<std::int64_t>> sum_over_ranks(std::vector<std::int64_t> own);
  [[nodiscard]] Expected<void> probe(const model::Model& layers, int times);
  [[nodiscard]] Expected<void> share_sizes();
  [[nodiscard]] Expected<void> ask_sources();
  [[nodiscard]] Expected<void> ask_sources_first();
  [[nodiscard]] Expected<void> rebuild();
  [[nodiscard]] Expected<void> choose_recomputed();
  void remake_program(plan::LayerSet recomputed);
  void make_room(const Exchange& exchanged);
  [[nodiscard]] Expected<void> prepare(StepReport& report);
  [[nodiscard]] Expected<void> balance(StepReport& report, Moves how);
  [[nodiscard]] Expected<void> carry_out(control::Decision& decision, StepReport& report,
                                         Moves how);
  // All ranks know this alike of a plan that layers move to.
  struct Wanted {
    plan::Migration migration;
    plan::LayerSet recomputed;
  };
  [[nodiscard]] Expected<Wanted> agree_on(const plan::Plan& plan, Moves how);
  [[nodiscard]] Expected<bool> move_now(const plan::Plan& plan, Wanted wanted);
  [[nodiscard]] bool holds_twice(const plan::Migration& migration) const;
  [[nodiscard]] Expected<void> finish_moving(StepReport& report);
  void send_layers();
  void settle_move(StepReport& report);
  [[nodiscard]] Expected<void> end_last_move();
  void give_up_move(LayerId refused);
  void count_work(const dynamism::Outcome& outcome, std::vector<cost::LayerSample>& layers);
  [[nodiscard]] Expected<void> measure_links();
  void check_numbers(StepReport& report, const std::vector<double>& squared_norms) const;
  void update(const StepReport& report);
  [[nodiscard]] Expected<void> update_all(const StepReport& report,
                                          const dynamism::Outcome& outcome);

  transport::Grid grid_;
  model::Model model_;
  PipelineOptions options_;
  RankState state_;
  bool goes_on_;  // from an earlier group, so that changes before the first step are news
  control::Decisions decisions_;
  Program program_;
  DeviceMessages device_messages_;
  RankTimes times_;  // newest step
  MigrationReport migration_;
  std::optional<BegunStep> begun_;
  std::vector<std::int64_t> room_;  // StepInput::room
  std::int64_t asked_for_ = -1;     // step before which the sources were asked last
  std::unique_ptr<Moving> moving_;
};

}  // namespace dynmo::runtime
