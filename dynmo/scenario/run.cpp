// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/run.h"

#include <algorithm>
#include <utility>

#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"
#include "dynmo/scenario/grid.h"
#include "dynmo/scenario/planning_impl.h"
#include "dynmo/scenario/replay_impl.h"

namespace dynmo::scenario {
namespace {

// Means, and what a failure takes back.
struct Sums {
  double weighted_bubble = 0;  // x step time
  double step_time = 0;
  double imbalance = 0;
  std::int64_t executed = 0;
  double rank_seconds = 0;     // in use
  double offered_seconds = 0;  // there
  // Since the last checkpoint.
  double train_s = 0;
  double micro_batches = 0;
  std::int64_t steps = 0;
};

class Run {
 public:
  Run(const Job& job, const dynamism::LoadModel& load, const Policy& policy,
      const RunOptions& options, Grid grid)
      : job_(job),
        scenario_(job.scenario),
        load_(load),
        policy_(policy),
        options_(options),
        model_(load.at(0)),
        recording_(recording_of(load, job.scenario, policy)),
        controller_(make_controller()),
        replayer_(std::move(grid), job.scenario.training.micro_batches) {
    for (int r = 0; r < scenario_.cluster.pipeline_ranks; ++r) present_.push_back(r);
    result_.name = policy.name;
  }

  Expected<RunResult> all() {
    if (recording_ != nullptr) {
      plan_ = recording_->start.plan;
    } else {
      DYNMO_ASSIGN(plan_, proposed(0));
    }
    if (autonomous()) charge_plan();
    // The first plan is on all ranks.
    if (policy_.rank_use == control::RankUse::kFewest) {
      controller_.announce(cost::Announced::kKnown, 0);
    }
    while (step_ < scenario_.training.steps) {
      if (const auto applied = apply_events(); !applied)
        return named(applied.error(), "events of ");
      if (const auto done = advance(); !done) return named(done.error(), "");
    }
    return finished();
  }

 private:
  // An error in the middle of a run, with where it was.
  [[nodiscard]] Error named(const Error& error, std::string_view what) const {
    return make_error(error.code, "policy {}, {}step {}, {} of {} ranks there: {}", policy_.name,
                      what, step_, present_.size(), scenario_.cluster.pipeline_ranks,
                      error.message);
  }
  [[nodiscard]] const cost::Cluster& cluster() const { return replayer_.grid().planned; }
  [[nodiscard]] int replicas() const { return replayer_.grid().replicas; }
  [[nodiscard]] bool autonomous() const { return policy_.replanning == Replanning::kAutonomous; }

  control::Controller make_controller() const {
    control::ControllerOptions options = controller_options(scenario_, policy_);
    if (recording_ != nullptr) options.accumulation = recording_->start.accumulation;
    control::Controller controller(model_, options);
    if (recording_ != nullptr) controller.use(recorded_profiler(*recording_, model_, options));
    return controller;
  }

  Expected<plan::Plan> proposed(Generation generation) const {
    return propose(scenario_, policy_, model_, cluster(), present_, generation);
  }

  // Time passes for the ranks there and the ranks in use.
  void spend(double& part, double seconds) {
    part += seconds;
    const auto in_use =
        static_cast<double>(std::count_if(present_.begin(), present_.end(), [&](int rank) {
          return !plan_.stages_of(Rank{rank}).empty();
        }));
    sums_.rank_seconds += seconds * in_use * replicas();
    sums_.offered_seconds += seconds * static_cast<double>(present_.size()) * replicas();
  }

  void charge_plan() {
    spend(result_.time.plan_s, scenario_.policy.plan_s);
    ++result_.plans;
  }

  // Layers go over to `next`. Every replica moves its own at the same time.
  void move_to(plan::Plan next) {
    const plan::Migration migration = plan::difference(plan_, next, model_);
    const auto bytes = static_cast<double>(migration.bytes().value);
    spend(result_.time.move_s,
          scenario_.policy.move_fixed_s + bytes / scenario_.policy.move_bandwidth);
    result_.layers_moved += static_cast<std::int64_t>(migration.moves.size());
    result_.bytes_moved += bytes * replicas();
    ++result_.migrations;
    plan_ = std::move(next);
  }

  Expected<void> apply_events() {
    while (event_ < scenario_.events.size() && scenario_.events[event_].step == step_) {
      const Event& event = scenario_.events[event_++];
      DYNMO_TRY(apply(event));
    }
    return {};
  }

  Expected<void> apply(const Event& event) {
    for (const std::int64_t rank : event.leave) std::erase(present_, static_cast<int>(rank));
    for (const std::int64_t rank : event.join) present_.push_back(static_cast<int>(rank));
    std::sort(present_.begin(), present_.end());
    if (event.replicas > 0 && event.replicas != replicas()) {
      DYNMO_TRY(set_replicas(static_cast<int>(event.replicas)));
    }
    const bool stranded =
        std::any_of(plan_.stages.begin(), plan_.stages.end(), [&](const plan::PlanStage& stage) {
          return !std::binary_search(present_.begin(), present_.end(), stage.rank.value);
        });
    if (event.failure || (stranded && !autonomous())) {
      spend(result_.time.restart_s, scenario_.training.restart_s);
    }
    if (stranded) {
      DYNMO_ASSIGN(plan::Plan next, proposed(plan_.generation + 1));
      charge_plan();
      move_to(std::move(next));
    }
    controller_.announce(cost::Announced::kKnown, step_);
    if (event.failure) go_back();
    return {};
  }

  // New replicas get the whole state of the model, each position of its own.
  Expected<void> set_replicas(int count) {
    const int added = count - replicas();
    DYNMO_ASSIGN(Grid grid, make_grid(scenario_.cluster, job_.device, count));
    replayer_.set_grid(std::move(grid));
    if (added <= 0) return {};
    std::vector<double> bytes(static_cast<std::size_t>(plan_.ranks), 0.0);
    double all = 0;
    for (std::int32_t i = 0; i < model_.size(); ++i) {
      const LayerId layer{i};
      const auto state = static_cast<double>(plan::moved_bytes(model_.layers[layer.index()]).value);
      bytes[plan_.owner(layer).index()] += state;
      all += state;
    }
    const double most = *std::max_element(bytes.begin(), bytes.end());
    spend(result_.time.move_s,
          scenario_.policy.move_fixed_s + most / scenario_.policy.move_bandwidth);
    result_.bytes_moved += all * added;
    return {};
  }

  // The steps since the last checkpoint are lost: their time stays spent, their tokens do not
  // count.
  void go_back() {
    result_.time.train_s -= sums_.train_s;
    result_.time.lost_s += sums_.train_s;
    result_.micro_batches -= sums_.micro_batches;
    result_.steps_lost += sums_.steps;
    step_ -= sums_.steps;
    fresh_ = true;
    forget_checkpoint_sums();
    controller_.announce(cost::Announced::kWork, step_);
  }

  void forget_checkpoint_sums() {
    sums_.train_s = 0;
    sums_.micro_batches = 0;
    sums_.steps = 0;
  }

  Expected<void> advance() {
    const auto announced = step_ > 0 ? load_.announced_at(step_) : cost::Announced::kNothing;
    const bool changed = announced != cost::Announced::kNothing;
    const bool sampled = step_ % scenario_.training.sample_every == 0 || changed || fresh_;
    if (sampled) {
      model_ = load_.at(step_);
      controller_.know(model_);
    }
    controller_.announce(announced, step_);
    fresh_ = false;
    if (autonomous()) DYNMO_TRY(replan());
    const bool traced = step_ >= scenario_.training.steps - options_.trace_steps;
    DYNMO_ASSIGN(const StepMeasure* measure,
                 replayer_.step(plan_, model_, traced ? Timelines::kKept : Timelines::kLeftOut));
    count(*measure);
    if (traced) {
      result_.trace.push_back({.step = step_,
                               .timeline = measure->timeline,
                               .duration = to_nanoseconds(measure->step_s)});
    }
    if (autonomous()) {
      spend(result_.time.profile_s, scenario_.policy.profile_share * measure->step_s);
      if (sampled) controller_.observe(observed(), plan_, model_.frozen_layers());
    }
    if (options_.progress) options_.progress(step_);
    ++step_;
    const std::int64_t every = scenario_.training.checkpoint_every;
    if (every > 0 && step_ % every == 0) forget_checkpoint_sums();
    return {};
  }

  void count(const StepMeasure& measure) {
    spend(result_.time.train_s, measure.step_s);
    const double micro_batches = scenario_.training.micro_batches * static_cast<double>(replicas());
    result_.micro_batches += micro_batches;
    sums_.train_s += measure.step_s;
    sums_.micro_batches += micro_batches;
    ++sums_.steps;
    ++sums_.executed;
    sums_.step_time += measure.step_s;
    sums_.weighted_bubble += measure.bubble * measure.step_s;
    sums_.imbalance += measure.imbalance;
    if (!measure.fits) ++result_.steps_over_memory;
  }

  cost::Observation observed() const {
    if (recording_ == nullptr) return measured(scenario_, step_, model_);
    const auto found = recording_->steps.find(step_);
    // Beyond its end the load stays as it was.
    return found != recording_->steps.end() ? found->second : recording_->steps.rbegin()->second;
  }

  Expected<void> replan() {
    const cost::Cluster there =
        recording_ == nullptr
            ? subset(cluster(), present_)
            : recorded_cluster(*recording_, scenario_, controller_.profiler().beside());
    const plan::Plan current = to_present(plan_, present_);
    DYNMO_ASSIGN(
        auto decision,
        controller_.decide({.plan = current, .step = step_, .known = model_, .cluster = there}));
    if (!decision) return {};
    charge_plan();
    decision->plan = to_all(decision->plan, present_, cluster().size());
    if (decision->migrate) move_to(decision->plan);
    result_.decisions.push_back({step_, *std::move(decision)});
    return {};
  }

  RunResult finished() {
    const double total = result_.time.total_s();
    const auto steps = static_cast<double>(scenario_.training.steps);
    const auto executed = static_cast<double>(sums_.executed);
    result_.tokens = result_.micro_batches * static_cast<double>(job_.tokens_per_micro_batch);
    result_.step_time_s = result_.time.train_s / steps;
    result_.bubble = sums_.step_time > 0 ? sums_.weighted_bubble / sums_.step_time : 0;
    result_.imbalance = sums_.imbalance / executed;
    result_.average_ranks = total > 0 ? sums_.rank_seconds / total : 0;
    result_.gpu_hours_saved = (sums_.offered_seconds - sums_.rank_seconds) / 3600;
    return std::move(result_);
  }

  const Job& job_;
  const Scenario& scenario_;
  const dynamism::LoadModel& load_;
  const Policy& policy_;
  const RunOptions& options_;
  cost::ModelCost model_;
  const dynamism::Recording* recording_;
  control::Controller controller_;
  Replayer replayer_;
  std::vector<int> present_;  // positions, ascending
  plan::Plan plan_;
  std::int64_t step_ = 0;
  bool fresh_ = true;  // costs of the next step are not known
  std::size_t event_ = 0;
  Sums sums_;
  RunResult result_;
};

}  // namespace

Expected<RunResult> run(const Job& job, const dynamism::LoadModel& load, const Policy& policy,
                        const RunOptions& options) {
  DYNMO_ASSIGN(Grid grid,
               make_grid(job.scenario.cluster, job.device, job.scenario.cluster.data_parallel));
  return Run(job, load, policy, options, std::move(grid)).all();
}

Expected<Comparison> compare(const Job& job, const std::vector<std::string>& policies,
                             const ComparisonOptions& options) {
  const Policy even{.name = "uniform"};
  const int runs = static_cast<int>(policies.size()) + 2;
  const auto one = [&](const dynamism::LoadModel& load, const Policy& policy, std::string name,
                       int number) {
    RunOptions run_options{.trace_steps = options.trace_steps};
    if (options.progress) {
      run_options.progress = [&, number](std::int64_t step) {
        options.progress({.run = name,
                          .number = number,
                          .runs = runs,
                          .step = step + 1,
                          .steps = job.scenario.training.steps});
      };
      run_options.progress(-1);  // it begins
    }
    return run(job, load, policy, run_options);
  };
  Comparison comparison;
  DYNMO_ASSIGN(comparison.dense, one(*job.dense, even, "dense", 0));
  comparison.dense.name = "dense";
  DYNMO_ASSIGN(comparison.uniform, one(*job.load, even, "uniform", 1));
  int number = 2;
  for (const std::string& name : policies) {
    DYNMO_ASSIGN(const Policy policy, parse_policy(name));
    if (name == "uniform") {
      comparison.runs.push_back(comparison.uniform);
    } else {
      DYNMO_ASSIGN(RunResult result, one(*job.load, policy, name, number));
      comparison.runs.push_back(std::move(result));
    }
    ++number;
  }
  return comparison;
}

}  // namespace dynmo::scenario
