// SPDX-License-Identifier: Apache-2.0
#pragma once

// One rank of a training pipeline, bound to one group. It takes the rank's state and runs steps of
// observe → plan → simulate → apply on it. It gives the state back when the group ends. Every rank
// constructs one with equal arguments and calls the same functions in the same order. All decisions
// follow from values that every rank has, so no rank waits for another's decision.
//
// The group may be several replicas of one pipeline (transport/grid.h). They share a plan, move
// layers together and sum gradients (runtime/reduction.h). A step has replicas x accumulation x
// micro_batches micro-batches, numbered in this order, the last factor fastest.

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

// Returns the controller of `state`, or one made from its `controller_state`, or a new one.
[[nodiscard]] control::Controller controller_of(RankState& state, const model::Model& model,
                                                const PipelineOptions& options);

class Pipeline {
 public:
  // Returns a micro-batch by its number in the step.
  using Batches = std::function<MicroBatch(std::int64_t step, MicroBatchId)>;

  // Takes initial or restored states of the layers that the state's plan gives this rank, and puts
  // them on its device. Requires a plan that is valid for the model and the ranks of a replica:
  // transport.size() / replicas.
  Pipeline(transport::Transport& transport, model::Model model, PipelineOptions options,
           RankState state);

  // Runs the next step's schedule. Leaves its gradients, summed over replicas and ties, in
  // states(). Makes no update and no exchange. Fails with kPeerLost.
  [[nodiscard]] Expected<StepOutput> accumulate(const Batches& batches);
  // Runs `steps` steps forward and backward without an update, and measures the costs. Fails with
  // kPeerLost. Call it before the first step.
  [[nodiscard]] Expected<void> measure(const Batches& batches, int steps);
  // Starts from the costs that another pipeline of the same model and group has measured. With
  // Recompute::kAuto, returns kInfeasible if the plan does not fit the memory even with every layer
  // recomputed.
  [[nodiscard]] Expected<void> use(const control::Profiler& measured);
  // Continues in a group that follows another. Measures the group's links, and chooses the layers
  // to recompute with the known costs. Returns the errors of use(), and kPeerLost.
  [[nodiscard]] Expected<void> go_on();
  // Runs one training step: begin_step(), exchange_figures() and finish_step(). Returns the first
  // error of these.
  [[nodiscard]] Expected<StepReport> step(const Batches& batches);
  // Asks the sources, plans, moves layers if that pays, and runs the schedule. Afterwards the
  // step's gradients are complete on this rank. Returns the errors of sources and plans, and
  // kPeerLost if a rank is lost.
  [[nodiscard]] Expected<void> begin_step(const Batches& batches);
  // Sends this rank's figures of the step to the other ranks, and returns the figures of all ranks.
  // Fails with kPeerLost.
  [[nodiscard]] Expected<Exchange> exchange_figures();
  // Clips, updates, and gives sources and controller the outcome. Sends nothing and needs no group.
  // So if the group was lost in the exchange, a rank can finish the step with the exchange that
  // another rank received. Requires gradients_complete().
  //
  // If StepReport::stop is set, nothing has changed and the step is not done. Returns kInternal if
  // the exchange is of another model or group.
  [[nodiscard]] Expected<StepReport> finish_step(const Exchange& exchanged);
  // Returns whether the step next_step() needs only finish_step().
  [[nodiscard]] bool gradients_complete() const { return begun_ && begun_->complete; }
  // Returns the mean loss over one step's number of micro-batches of held-out data. It runs forward
  // only, and the replicas share the micro-batches as in a step. kGeneration uses the decisions
  // that layers take during generation. Returns the errors of sources, and kPeerLost if a rank is
  // lost.
  [[nodiscard]] Expected<double> validate(const Batches& batches,
                                          model::Pass pass = model::Pass::kValidation);
  // Decides now, because ranks have joined, and moves layers if that pays. The report has only the
  // decision and the move. Returns the errors of begin_step().
  [[nodiscard]] Expected<StepReport> rebalance();
  // Removes all layers from the positions that are not in `kept`, which is ascending. Returns a
  // report like rebalance(). No layer moves if a copy was refused, or if the ranks' memory does not
  // suffice. Returns kInfeasible if no plan fits the memory, and kBadInput if nothing was measured
  // yet.
  [[nodiscard]] Expected<StepReport> vacate(const std::vector<Rank>& kept);
  // Returns which positions without layers are released now, if any (Controller::release).
  [[nodiscard]] std::optional<control::Release> release() {
    return decisions_.release(state_.plan, state_.step);
  }
  // Moves to `plan` now. Returns false if a copy was refused and the old plan stays. Fails with
  // kPeerLost.
  [[nodiscard]] Expected<bool> apply(const plan::Plan& plan);
  // Begins to move to `plan` while the next step runs under the present plan. The new plan applies
  // from the step after it, unless a copy is refused (background_move.h). Like apply(), moves at
  // once if no layer moves, or if the memory cannot hold both copies during a step.
  [[nodiscard]] Expected<bool> begin_move(const plan::Plan& plan);
  // Returns the plan of the next step if layers moved to it during the last one, else null. All
  // ranks then hold its layers.
  [[nodiscard]] const plan::Plan* coming_plan() const {
    return move_.running && move_.running->agreed ? &move_.running->plan : nullptr;
  }
  // Takes a snapshot before the next step (snapshot.h). The report is not committed if a copy was
  // refused.
  [[nodiscard]] Expected<MigrationReport> take_snapshot(std::span<const WorldRank> keepers);

  // Ends this pipeline and returns the rank's state for the next group. Works after an error, too.
  // Drops a step that was not finished, which has only made gradients.
  [[nodiscard]] RankState take_state();

  // Returns the measured costs, with the frozen prefix of the next step, or nullopt before the
  // first measurement.
  [[nodiscard]] std::optional<cost::ModelCost> costs() const {
    return decisions_.costs(state_.frozen_layers);
  }
  [[nodiscard]] cost::Cluster cluster() const { return decisions_.cluster(); }
  [[nodiscard]] const control::Profiler& profiler() const { return decisions_.profiler(); }
  // Returns the newest step's observation, and the change that sources announced before that step.
  [[nodiscard]] const cost::Observation& observed() const { return decisions_.observed(); }
  [[nodiscard]] cost::Announced announced() const { return decisions_.announced(); }
  [[nodiscard]] const transport::Grid& grid() const { return grid_; }
  [[nodiscard]] const plan::Plan& plan() const { return state_.plan; }
  // Returns the layers that save only their input and run forward again. All ranks choose them
  // alike, after every plan, every change of the frozen prefix, and the first costs.
  [[nodiscard]] const plan::LayerSet& recomputed() const { return program_.recomputed; }
  // Returns everything that take_state() gives back, except for the controller.
  [[nodiscard]] const RankState& state() const { return state_; }
  [[nodiscard]] const LayerStates& states() const { return state_.layers; }
  [[nodiscard]] LayerStates& states() { return state_.layers; }
  // Returns the staging of the states.
  [[nodiscard]] const Staging& staging() const { return options_.staging; }
  [[nodiscard]] std::int64_t next_step() const { return state_.step; }
  [[nodiscard]] int frozen_layers() const { return state_.frozen_layers; }
  [[nodiscard]] const model::Model& model() const { return model_; }
  [[nodiscard]] const dynamism::Sources& sources() const { return state_.sources; }
  [[nodiscard]] const MigrationReport& last_migration() const { return move_.last; }

 private:
  // A step that was begun and not finished.
  struct BegunStep {
    StepReport report;
    StepOutput output = {};
    std::chrono::steady_clock::time_point start = {};
    std::chrono::steady_clock::time_point ready = {};  // time at which the schedule could start
    bool complete = false;                             // whether its gradients are complete
  };
  // A move during a step.
  struct Moving {
    plan::Plan plan;
    plan::LayerSet recomputed;
    int layers = 0;
    Bytes bytes;
    MigrationReport report = {};
    BackgroundMove transfer;
    // Set after the step if all ranks hold the sent layers.
    bool agreed = false;
  };
  // Moves of this pipeline.
  struct Move {
    MigrationReport last;             // the newest finished move
    std::unique_ptr<Moving> running;  // null: none
  };
  // The newest call of the sources, which are asked once before each step.
  struct Asked {
    // Set if the pipeline follows an earlier group. Then changes before its first step are news.
    bool goes_on = false;
    std::int64_t step = -1;  // the step before which they were last asked; -1: none

    [[nodiscard]] bool once() const { return step >= 0; }
  };
  enum class Moves { kNow, kDuringStep };
  [[nodiscard]] transport::Tag control(transport::Control use) const;
  [[nodiscard]] control::Decisions::Now now() const;
  // Makes the input that the rounds of a step share with those of validation.
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
  // A move to a plan, equal on all ranks.
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
  // Makes later work wait for copies of layers in progress. Call it before layers change.
  void order_changes() const;
  void check_numbers(StepReport& report, const std::vector<double>& squared_norms) const;
  void update(const StepReport& report);
  [[nodiscard]] Expected<void> update_all(const StepReport& report,
                                          const dynamism::Outcome& outcome);

  transport::Grid grid_;
  model::Model model_;
  PipelineOptions options_;
  RankState state_;
  Asked asked_;
  control::Decisions decisions_;
  Program program_;
  DeviceMessages device_messages_;
  RankTimes times_;  // newest step
  std::optional<BegunStep> begun_;
  std::vector<std::int64_t> room_;  // StepInput::room
  Move move_;
};

}  // namespace dynmo::runtime
