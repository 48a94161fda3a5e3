// SPDX-License-Identifier: Apache-2.0
#pragma once

// One rank of a training pipeline: its layers, the plan, and the loop observe → plan → simulate →
// apply. Every rank constructs one with equal arguments and calls the same functions in the same
// order; all decisions follow from values that every rank has, so no rank waits for another's
// opinion.
//
// The group may be several replicas of one pipeline (runtime/grid.h), which share one plan, move
// layers together and add up their gradients (runtime/reduction.h). A step has replicas x
// accumulation x micro_batches micro-batches, numbered in this order, the last one fastest.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/dynamism/freezing.h"
#include "dynmo/model/adamw.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/learning_rate.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/policy.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/runtime/channel_transport.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/exchange.h"
#include "dynmo/runtime/grid.h"
#include "dynmo/runtime/migrate.h"
#include "dynmo/runtime/profiler.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

enum class Balancing { kNever, kAutomatic };

// What to do with a step whose loss or gradient norm is no finite number.
enum class OnNan {
  kStop,  // an error that names step, layer and rank
  kSkip,  // no update; training goes on with the next step
};

struct PipelineOptions {
  std::uint64_t seed = 1;
  std::int64_t steps =
      0;  // of the whole run: horizon of the policy, end of learning rate and freezing
  int micro_batches = 1;                     // of one round of the schedule
  int accumulation = 1;                      // rounds of the schedule before an update
  int replicas = 1;                          // pipelines in the group
  std::vector<std::int64_t> boundary_shape;  // {B, T, D} of a micro-batch's hidden tensor
  at::ScalarType boundary_type = at::kFloat;
  std::vector<model::Tie> ties;  // as runtime/ties.h accepts them
  model::AdamWOptions optimizer;
  model::LearningRateOptions learning_rate;
  double clip_norm = 1;  // of the gradients of all trained layers; 0: no clipping
  OnNan on_nan = OnNan::kStop;
  std::optional<dynamism::FreezingSchedule> freezing;
  Balancing balancing = Balancing::kAutomatic;
  plan::PolicyOptions policy;
  plan::Recompute recompute = plan::Recompute::kNone;
  Bytes memory = cost::kUnlimitedMemory;  // of a rank, for plans and for Recompute::kAuto
  int profile_window = 5;                 // least steps, 3 or more
  Staging staging = {};                   // where this rank computes
  ChannelTransport* channels = nullptr;   // of the group; see StepInput::device_messages
  int lane = 0;  // pipelines of one group that run in turn need different ones
};

// What one step did; equal on all ranks except where said.
struct StepReport {
  std::int64_t step = 0;
  double loss = 0;           // mean over the micro-batches
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  int frozen_layers = 0;
  double step_s = 0;  // this rank's clock, balancing included
  // By replay of the plan, from costs of the steps before. 0: none yet.
  double predicted_s = 0;
  // By rank of the group: computing in this step and updating at the end of the one before, all
  // between the exchanges of the two steps.
  std::vector<double> busy_s;
  double imbalance = 0;    // max / mean - 1 of busy_s, over all ranks
  double bubble = 0;       // 1 - mean of busy_s / time between the exchanges, by this clock
  double reduction_s = 0;  // exposed: this rank's time in summing gradients over the replicas
  double profile_s = 0;    // this rank's own
  double plan_s = 0;
  double migrate_s = 0;
  std::optional<plan::Decision> decision;  // what the policy said this step, where it was asked
  bool skipped = false;                    // no update: loss or norm were no numbers (OnNan::kSkip)
  int moved_layers = 0;
  Bytes moved_bytes;
  std::vector<LayerSample> layers;              // by LayerId, as measured in this step
  std::vector<schedule::TimedAction> actions;   // this rank's, compute
  std::vector<schedule::TimedAction> messages;  // this rank's (StepOutput::messages)
  std::int64_t start_ns = 0;                    // steady clock, of `actions`
};

class Pipeline {
 public:
  // A micro-batch by its number in the step.
  using Batches = std::function<MicroBatch(std::int64_t step, MicroBatchId)>;

  // Takes initial or restored states of the layers `plan` gives this rank of its replica, and puts
  // them on its device; `first_step` is the next step to run. Requires a plan valid for the model
  // and the ranks of a replica: transport.size() / replicas.
  Pipeline(transport::Transport& transport, model::Model model, PipelineOptions options,
           plan::Plan plan, LayerStates states, std::int64_t first_step = 0);

  // Runs the next step's schedule and leaves its gradients, summed over replicas and ties, in
  // states(); no update, no exchange.
  [[nodiscard]] Expected<StepOutput> accumulate(const Batches& batches);
  // Runs `steps` steps forward and backward without an update, so that costs are known before the
  // first step.
  [[nodiscard]] Expected<void> measure(const Batches& batches, int steps);
  // Starts from costs that another pipeline of the same model and group has measured.
  // kInfeasible (Recompute::kAuto): the plan does not fit the memory with every layer recomputed.
  [[nodiscard]] Expected<void> use(const Profiler& measured);
  // Runs one training step: freeze, plan and move if it pays, run the schedule, clip, update.
  [[nodiscard]] Expected<StepReport> step(const Batches& batches);
  // Mean loss over a step's number of micro-batches of held-out data, forward only, shared out over
  // the replicas like those of a step.
  [[nodiscard]] Expected<double> validate(const Batches& batches);
  // Moves to `plan` now. False where a copy was refused and the old plan runs on.
  [[nodiscard]] Expected<bool> apply(const plan::Plan& plan);

  // Costs as measured, with the frozen prefix of the next step; nullopt before anything was
  // measured.
  [[nodiscard]] std::optional<cost::ModelCost> costs() const;
  [[nodiscard]] const Profiler& profiler() const { return profiler_; }
  [[nodiscard]] const Grid& grid() const { return grid_; }
  [[nodiscard]] const plan::Plan& plan() const { return plan_; }
  // Layers that keep their input only, under the plan in force: chosen anew with every plan, every
  // longer frozen prefix and the first costs, alike on all ranks.
  [[nodiscard]] const plan::LayerSet& recomputed() const { return recomputed_; }
  [[nodiscard]] const LayerStates& states() const { return states_; }
  [[nodiscard]] LayerStates& states() { return states_; }
  [[nodiscard]] const Staging& staging() const { return options_.staging; }  // of the states
  [[nodiscard]] std::int64_t next_step() const { return step_; }
  [[nodiscard]] int frozen_layers() const { return frozen_; }
  [[nodiscard]] const MigrationReport& last_migration() const { return migration_; }

 private:
  [[nodiscard]] transport::Tag control(int use) const;
  // What the rounds of a step have in common with those of validation.
  [[nodiscard]] StepInput round_input(const schedule::Schedule& lowered, const Batches& batches,
                                      int round) const;
  [[nodiscard]] std::optional<cost::ModelCost> round_costs() const;
  void freeze_prefix();
  void build_schedules();
  [[nodiscard]] Expected<void> open_channels();
  [[nodiscard]] Expected<plan::LayerSet> recomputed_under(const plan::Plan& plan) const;
  void recompute(plan::LayerSet layers);
  void take_measures();
  [[nodiscard]] double predicted_step_s() const;  // StepReport::predicted_s
  [[nodiscard]] Expected<void> balance(StepReport& report);
  [[nodiscard]] Expected<Exchange> exchange_figures(const StepOutput& output);
  [[nodiscard]] Expected<void> check_numbers(StepReport& report,
                                             const std::vector<double>& squared_norms) const;
  void update(StepReport& report);

  Grid grid_;
  std::unique_ptr<transport::Transport> device_messages_;  // null: none
  bool channels_due_ = false;                              // of new schedules
  model::Model model_;
  PipelineOptions options_;
  plan::Plan plan_;
  LayerStates states_;
  std::int64_t step_ = 0;
  int frozen_ = 0;
  int planned_frozen_ = 0;                      // frozen layers at the last decision
  std::optional<cost::ModelCost> planned_for_;  // costs of the last decision that made a plan

  cost::Cluster cluster_;
  Profiler profiler_;
  plan::LayerSet recomputed_;
  model::Model running_;           // model_, those of recomputed_ wrapped
  schedule::Schedule training_;    // lowered
  schedule::Schedule validation_;  // lowered, forward only
  std::map<LayerId, double> update_s_;
  double update_total_s_ = 0;  // of this rank, last step
  double schedule_s_ = 0;      // of this rank, last step: its rounds without reducing
  double reduction_s_ = 0;     // of this rank, last step
  double reducing_s_ = 0;      // the part of it that lies within actions
  // Of this rank, as it measured last (StepSample); 0: not yet.
  double own_overhead_s_ = 0;
  double own_message_s_ = 0;
  double own_reduction_bytes_per_s_ = 0;
  double after_exchange_s_ = 0;  // of this rank, last step
  MigrationReport migration_;
  double own_plan_s_ = 0;   // of this rank, last step
  double plan_cost_s_ = 0;  // agreed: largest of any rank
  double migrate_cost_s_ = 0;
  Bytes migrated_;
  std::int64_t last_change_ = 0;  // step of the last migration
};

// Layers that `plan` gives to `rank`, with their initial values.
[[nodiscard]] LayerStates initial_states(const model::Model& model, const plan::Plan& plan,
                                         Rank rank, std::uint64_t seed,
                                         const std::vector<model::Tie>& ties = {});

// Control uses (transport/tags.h) below this one are free for the users of pipelines.
inline constexpr int kFirstPipelineUse = 16;

}  // namespace dynmo::runtime
