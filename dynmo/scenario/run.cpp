// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/run.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"
#include "dynmo/scenario/grid.h"
#include "dynmo/scenario/planning_impl.h"
#include "dynmo/scenario/replay_impl.h"
#include "dynmo/scenario/shares_impl.h"

namespace dynmo::scenario {
namespace {

// Means, and what a failure takes back.
struct Sums {
  double weighted_bubble = 0;  // x step time
  double step_time = 0;
  double imbalance = 0;
  double ideal = 0;
  std::int64_t executed = 0;
  double end_step_time = 0;
  double end_ideal = 0;
  std::int64_t end_steps = 0;
  double rank_seconds = 0;     // in use
  double held_seconds = 0;     // those too that have no layers
  double offered_seconds = 0;  // those too that were given back
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
    offered_ = present_.size();
    result_.name = policy.name;
  }

  Expected<RunResult> all() {
    if (recording_ != nullptr) {  // it began with the ranks that its first step had
      present_ = first_ranks(scenario_);
      offered_ = present_.size();
      plan_ = to_all(recording_->start.plan, present_, cluster().size());
      while (event_ < scenario_.events.size() && scenario_.events[event_].step == 0) ++event_;
    } else {
      DYNMO_ASSIGN(plan_, proposed(present_, 0));
    }
    if (autonomous()) charge_plan();
    if (autonomous() && options_.shares) {
      others_.emplace(job_, policy_, replayer_.grid(), plan_);
    }
    while (step_ < scenario_.training.steps) {
      const auto applied = apply_events();
      if (!applied) return named(applied.error(), "events of ");
      const bool releases = autonomous() && policy_.rank_use == control::RankUse::kFewest;
      if (releases && step_ > 0 && !*applied) release();
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

  Expected<plan::Plan> proposed(const std::vector<int>& there, Generation generation) const {
    return policy_.cut_for == Model::kDense
               ? propose(scenario_, policy_, job_.dense->at(0), cluster(), there, generation)
               : propose(scenario_, policy_, model_, cluster(), there, generation);
  }
  // The ranks that are there, as the controller knows them.
  [[nodiscard]] cost::Cluster planned_ranks() const {
    if (recording_ == nullptr) return subset(cluster(), present_);
    return recorded_cluster(*recording_, scenario_, present_.size(),
                            controller_.profiler().overhead());
  }

  // Time passes for the ranks there and the ranks in use.
  void spend(double& part, double seconds) {
    part += seconds;
    const auto in_use =
        static_cast<double>(std::count_if(present_.begin(), present_.end(), [&](int rank) {
          return !plan_.stages_of(Rank{rank}).empty();
        }));
    sums_.rank_seconds += seconds * in_use * replicas();
    sums_.held_seconds += seconds * static_cast<double>(present_.size()) * replicas();
    sums_.offered_seconds += seconds * static_cast<double>(offered_) * replicas();
  }

  void charge_plan() {
    spend(result_.time.plan_s, plan_s(scenario_, policy_));
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

  // A decision of the controller over the ranks that are there.
  void take(control::Decision decision) {
    charge_plan();
    decision.plan = to_all(decision.plan, present_, cluster().size());
    if (decision.migrate) move_to(decision.plan);
    result_.decisions.push_back({step_, std::move(decision)});
  }

  // Whether there was one.
  Expected<bool> apply_events() {
    const std::size_t before = event_;
    while (event_ < scenario_.events.size() && scenario_.events[event_].step == step_) {
      DYNMO_TRY(apply(scenario_.events[event_++]));
    }
    return event_ > before;
  }

  Expected<void> apply(const Event& event) {
    std::vector<int> kept = present_;
    for (const std::int64_t rank : event.leave) std::erase(kept, static_cast<int>(rank));
    std::vector<int> next = kept;
    for (const std::int64_t rank : event.join) next.push_back(static_cast<int>(rank));
    std::sort(next.begin(), next.end());
    offered_ = offered_ + event.join.size() - event.leave.size();
    if (event.replicas > 0 && event.replicas != replicas()) {
      DYNMO_TRY(set_replicas(static_cast<int>(event.replicas)));
      controller_.announce(cost::Announced::kKnown, step_);
    }
    const bool stranded =
        std::any_of(plan_.stages.begin(), plan_.stages.end(), [&](const plan::PlanStage& stage) {
          return !std::binary_search(kept.begin(), kept.end(), stage.rank.value);
        });
    if (event.failure || (stranded && !autonomous())) {
      spend(result_.time.restart_s, scenario_.training.restart_s);
    }
    if (stranded) DYNMO_TRY(vacate(kept, next));
    change_ranks(kept, next);
    if (event.failure) go_back();
    return {};
  }

  // Takes the layers of the ranks that are not among `kept`. What begins anew or has not measured
  // anything takes the ranks of `next`, too.
  Expected<void> vacate(const std::vector<int>& kept, const std::vector<int>& next) {
    if (!autonomous() || controller_.profiler().steps() == 0) {
      DYNMO_ASSIGN(plan::Plan plan, proposed(next, plan_.generation + 1));
      charge_plan();
      move_to(std::move(plan));
      return {};
    }
    std::vector<Rank> staying;
    for (std::size_t i = 0; i < present_.size(); ++i) {
      if (std::binary_search(kept.begin(), kept.end(), present_[i])) {
        staying.emplace_back(static_cast<std::int32_t>(i));
      }
    }
    const plan::Plan current = to_present(plan_, present_);
    DYNMO_ASSIGN(control::Decision decision,
                 controller_.vacate(
                     {.plan = current, .step = step_, .known = model_, .cluster = planned_ranks()},
                     staying));
    take(std::move(decision));
    return {};
  }

  // From now on the ranks of `next` are there: those of `kept`, and others that come new.
  void change_ranks(const std::vector<int>& kept, const std::vector<int>& next) {
    if (kept == present_ && next == present_) return;
    std::vector<std::optional<Rank>> before;
    for (const int rank : next) {
      const auto place = std::lower_bound(present_.begin(), present_.end(), rank);
      before.push_back(std::binary_search(kept.begin(), kept.end(), rank)
                           ? std::optional(Rank(
                                 static_cast<std::int32_t>(std::distance(present_.begin(), place))))
                           : std::nullopt);
    }
    controller_.ranks_changed(before);
    present_ = next;
    ++plan_.generation;  // it numbers groups, too
  }

  // Gives ranks back that have had no layers for long.
  void release() {
    const auto released = controller_.release(to_present(plan_, present_), step_);
    if (!released) return;
    std::vector<int> kept;
    for (const Rank rank : released->kept) kept.push_back(present_[rank.index()]);
    change_ranks(kept, kept);
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
    if (others_) DYNMO_TRY(others_->add(model_));
    if (traced) {
      result_.trace.push_back({.step = step_,
                               .timeline = measure->timeline,
                               .duration = to_nanoseconds(measure->step_s)});
    }
    if (autonomous()) {
      spend(result_.time.profile_s, scenario_.policy.profile_share * measure->step_s);
      if (sampled) observe();
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
    sums_.ideal += measure.ideal_step_s;
    if (step_ >=
        scenario_.training.steps - std::max<std::int64_t>(scenario_.training.steps / 10, 1)) {
      sums_.end_step_time += measure.step_s;
      sums_.end_ideal += measure.ideal_step_s;
      ++sums_.end_steps;
    }
    if (!measure.fits) ++result_.steps_over_memory;
  }

  void observe() {
    controller_.observe(observed(), to_present(plan_, present_), model_.frozen_layers());
  }

  cost::Observation observed() {
    if (recording_ == nullptr) {
      cost::Observation seen =
          measured({.scenario = scenario_, .policy = policy_, .counts_work = load_.counts_work()},
                   step_, model_);
      seen.steps = std::max<std::int64_t>(step_ - std::exchange(observed_step_, step_), 1);
      return seen;
    }
    const auto found = recording_->steps.find(step_);
    // Beyond its end the load stays as it was.
    return found != recording_->steps.end() ? found->second : recording_->steps.rbegin()->second;
  }

  Expected<void> replan() {
    const cost::Cluster there = planned_ranks();
    const plan::Plan current = to_present(plan_, present_);
    DYNMO_ASSIGN(
        auto decision,
        controller_.decide({.plan = current, .step = step_, .known = model_, .cluster = there}));
    if (decision) take(*std::move(decision));
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
    result_.ideal_step_time_s = sums_.ideal / executed;
    const auto end_steps = static_cast<double>(sums_.end_steps);
    result_.end = {.step_time_s = sums_.end_step_time / end_steps,
                   .ideal_step_time_s = sums_.end_ideal / end_steps};
    result_.average_ranks = total > 0 ? sums_.rank_seconds / total : 0;
    if (others_) result_.others = others_->times();
    result_.gpu_hours_saved = (sums_.offered_seconds - sums_.held_seconds) / 3600;
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
  StepReplayer replayer_;
  std::vector<int> present_;  // positions, ascending
  std::size_t offered_ = 0;   // there, or given back
  plan::Plan plan_;
  std::int64_t step_ = 0;
  bool fresh_ = true;                // costs of the next step are not known
  std::int64_t observed_step_ = -1;  // the newest
  std::size_t event_ = 0;
  Sums sums_;
  std::optional<OtherPlans> others_;
  RunResult result_;
};

}  // namespace

Expected<RunResult> run(const Job& job, const dynamism::LoadModel& load, const Policy& policy,
                        const RunOptions& options) {
  DYNMO_ASSIGN(Grid grid,
               make_grid(job.scenario.cluster, job.device, job.scenario.cluster.data_parallel));
  return Run(job, load, policy, options, std::move(grid)).all();
}

std::optional<Shares> shares_of(const RunResult& run) {
  if (!run.others || !(run.others->kept_s > run.others->best_s)) return std::nullopt;
  const auto [kept, best, past] = *run.others;
  const auto share = [kept = kept](double seconds, double bound) {
    return kept > bound ? (kept - seconds) / (kept - bound) : 0;
  };
  return Shares{.cuts = share(run.time.train_s, best),
                .whole = share(run.time.total_s(), best),
                .past = share(run.time.train_s, past)};
}

Expected<Comparison> compare(const Job& job, const std::vector<std::string>& policies,
                             const ComparisonOptions& options) {
  if (options.shares && !job.scenario.events.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "--shares: the scenario has {} events, wanted one whose ranks stay; leave "
                      "--shares or the events out",
                      job.scenario.events.size());
  }
  const Policy even{.name = "uniform"};
  const int runs = static_cast<int>(policies.size()) + 2;
  const auto one = [&](const dynamism::LoadModel& load, const Policy& policy, std::string name,
                       int number) {
    RunOptions run_options{.trace_steps = options.trace_steps, .shares = options.shares};
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
      const bool dense = policy.trained == Model::kDense;
      DYNMO_ASSIGN(RunResult result, one(dense ? *job.dense : *job.load, policy, name, number));
      comparison.runs.push_back(std::move(result));
    }
    ++number;
  }
  return comparison;
}

}  // namespace dynmo::scenario
