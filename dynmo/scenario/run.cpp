// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/run.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"
#include "dynmo/scenario/grid.h"
#include "dynmo/scenario/job.h"
#include "dynmo/scenario/planning_impl.h"
#include "dynmo/scenario/replay_impl.h"
#include "dynmo/scenario/score_impl.h"
#include "dynmo/scenario/shares_impl.h"

namespace dynmo::scenario {
namespace {

// The time of a move: while a step runs, or between two steps.
enum class Moves { kDuringStep, kAtOnce };

class Run {
 public:
  Run(const Job& job, const dynamism::LoadModel& load, const Policy& policy,
      const RunOptions& options, Grid grid)
      : job_(job),
        load_{.model = load, .recording = recording_of(load, job.scenario, policy)},
        policy_(policy),
        options_(options),
        costs_{.model = load.at(0)},
        controller_(make_controller()),
        replayer_(std::move(grid), job.scenario.training.micro_batches),
        score_(policy.name) {
    for (int r = 0; r < scenario().cluster.pipeline_ranks; ++r) ranks_.present.push_back(r);
    ranks_.offered = ranks_.present.size();
  }

  Expected<RunResult> all() {
    if (load_.recording != nullptr) {  // it began with the ranks that its first step had
      ranks_.present = first_ranks(scenario());
      ranks_.offered = ranks_.present.size();
      plans_.now = to_all(load_.recording->start.plan, ranks_.present, cluster().size());
      while (due() != nullptr) ++ranks_.next_event;
    } else {
      DYNMO_ASSIGN(plans_.now, proposed(ranks_.present, 0));
    }
    DYNMO_TRY(choose_recomputed());
    if (autonomous()) charge_plan();
    if (autonomous() && options_.shares) {
      others_.emplace(job_, policy_, replayer_.grid(), plans_.now);
    }
    while (step_ < scenario().training.steps) {
      const auto applied = apply_events();
      if (!applied) return named(applied.error(), "events of ");
      const bool releases = autonomous() && policy_.rank_use == control::RankUse::kFewest;
      if (releases && step_ > 0 && !*applied) release();
      if (const auto done = advance(); !done) return named(done.error(), "");
    }
    return finished();
  }

 private:
  struct Costs {
    cost::ModelCost model;
    bool fresh = true;                // the costs of the next step are not known yet
    std::int64_t observed_step = -1;  // newest observed step; -1: none
    // The layers that plans_.now recomputes, then those of plans_.left. They follow from the plan,
    // the measured costs and the number of frozen layers at that time.
    plan::LayerSet recomputed = {};
    plan::LayerSet recomputed_by_left = {};
    int frozen = 0;
  };
  struct Ranks {
    std::vector<int> present;  // positions, ascending
    std::size_t offered = 0;   // present, or given back
    std::size_t next_event = 0;
    std::map<Rank, double> speeds = {};  // by position, if an event has changed it
  };

  [[nodiscard]] const Scenario& scenario() const { return job_.scenario; }
  // Returns an error with the place in the run where it happened.
  [[nodiscard]] Error named(const Error& error, std::string_view what) const {
    return make_error(error.code, "policy {}, {}step {}, {} of {} ranks there: {}", policy_.name,
                      what, step_, ranks_.present.size(), scenario().cluster.pipeline_ranks,
                      error.message);
  }
  [[nodiscard]] const cost::Cluster& cluster() const { return replayer_.grid().planned; }
  [[nodiscard]] int replicas() const { return replayer_.grid().replicas; }
  [[nodiscard]] bool autonomous() const { return policy_.replanning == Replanning::kAutonomous; }

  // Returns whether the controller has measurements to decide by.
  [[nodiscard]] bool decides() const { return autonomous() && controller_.profiler().steps() > 0; }

  control::Controller make_controller() const {
    control::ControllerOptions options = controller_options(scenario(), policy_);
    if (load_.recording != nullptr) options.accumulation = load_.recording->start.accumulation;
    control::Controller controller(costs_.model, options);
    if (load_.recording != nullptr)
      controller.use(recorded_profiler(*load_.recording, costs_.model, options));
    return controller;
  }

  Expected<plan::Plan> proposed(const std::vector<int>& there, Generation generation) const {
    if (policy_.cut_for != Model::kDense) {
      return propose(scenario(), policy_, costs_.model, cluster(), there, generation);
    }
    const cost::ModelCost dense = job_.dense->at(0);
    DYNMO_ASSIGN(plan::Plan plan,
                 propose(scenario(), policy_, dense, cluster(), there, generation));
    return with_layers_of(std::move(plan), dense, costs_.model);
  }
  // Returns the present ranks, as the controller knows them.
  [[nodiscard]] cost::Cluster planned_ranks() const {
    if (load_.recording == nullptr) return subset(cluster(), ranks_.present);
    return recorded_cluster(*load_.recording, scenario(), ranks_.present.size(),
                            controller_.profiler().overhead());
  }

  Expected<void> choose_recomputed() {
    costs_.frozen = costs_.model.frozen_layers();
    const plan::Recompute choice = recompute_of(scenario());
    if (choice == plan::Recompute::kNone) return {};
    const auto measured = controller_.costs(costs_.model);
    DYNMO_ASSIGN(plan::Judged judged,
                 plan::judge(choice, to_present(plans_.now, ranks_.present),
                             {measured ? *measured : costs_.model, planned_ranks(),
                              scenario().training.micro_batches}));
    costs_.recomputed = std::move(judged.recomputed);
    return {};
  }
  // Returns the boundary before this step.
  [[nodiscard]] control::Boundary boundary(const plan::Plan& present,
                                           const cost::Cluster& there) const {
    return {.plan = present,
            .step = step_,
            .known = costs_.model,
            .cluster = there,
            .recomputed = costs_.recomputed};
  }

  [[nodiscard]] RanksHeld held() const {
    const auto in_use = std::count_if(ranks_.present.begin(), ranks_.present.end(), [&](int rank) {
      return !plans_.now.stages_of(Rank{rank}).empty();
    });
    return {.in_use = static_cast<std::size_t>(in_use),
            .present = ranks_.present.size(),
            .offered = ranks_.offered,
            .replicas = replicas()};
  }
  void spend(double TimeSpent::*part, double seconds) { score_.spend(part, seconds, held()); }

  void charge_plan() {
    spend(&TimeSpent::plan_s, plan_s(scenario(), policy_));
    score_.count_plan();
  }

  // Adds the time of a move for which training waits for `bytes`.
  void charge_move(double bytes) {
    spend(&TimeSpent::move_s,
          scenario().policy.move_fixed_s + bytes / scenario().policy.move_bandwidth);
  }

  // Moves the layers to `next`. All replicas move theirs at the same time.
  void move_to(plan::Plan next, Moves moves) {
    const plan::Migration migration = plan::difference(plans_.now, next, costs_.model);
    const auto bytes = static_cast<double>(migration.bytes().value);
    const auto waited_for = moves == Moves::kAtOnce
                                ? bytes
                                : static_cast<double>(migration.gradient_bytes(costs_.model).value);
    charge_move(waited_for);
    score_.count_move(static_cast<std::int64_t>(migration.moves.size()), bytes * replicas());
    plans_.now = std::move(next);
  }

  // Carries out a decision of the controller, which knows the present ranks only.
  Expected<void> take(control::Decision decision, Moves moves) {
    charge_plan();
    decision.plan = to_all(decision.plan, ranks_.present, cluster().size());
    if (decision.migrate) {
      move_to(decision.plan, moves);
      costs_.recomputed_by_left = costs_.recomputed;
      DYNMO_TRY(choose_recomputed());
    }
    score_.keep(DecisionAt{step_, std::move(decision)});
    return {};
  }

  // Returns the next event of this step, or null.
  [[nodiscard]] const Event* due() const {
    const std::vector<Event>& events = scenario().events;
    const bool more = ranks_.next_event < events.size();
    return more && events[ranks_.next_event].step == step_ ? &events[ranks_.next_event] : nullptr;
  }

  // Applies the events of this step. Returns whether there was one.
  Expected<bool> apply_events() {
    const std::size_t before = ranks_.next_event;
    while (const Event* event = due()) {
      ++ranks_.next_event;
      DYNMO_TRY(apply(*event));
    }
    return ranks_.next_event > before;
  }

  Expected<void> apply(const Event& event) {
    std::vector<int> kept = ranks_.present;
    for (const std::int64_t rank : event.leave) std::erase(kept, static_cast<int>(rank));
    std::vector<int> next = kept;
    for (const std::int64_t rank : event.join) next.push_back(static_cast<int>(rank));
    std::sort(next.begin(), next.end());
    if (next.empty() || (kept.empty() && decides())) {
      return make_error(ErrorCode::kInfeasible,
                        "event.leave at step {} takes all ranks that the policy kept: wanted one "
                        "that stays, with a larger policy.ranks_min or a policy without +pack",
                        event.step);
    }
    ranks_.offered = ranks_.offered + event.join.size() - event.leave.size();
    if (event.replicas > 0 && event.replicas != replicas()) {
      DYNMO_TRY(set_replicas(static_cast<int>(event.replicas)));
      controller_.announce(cost::Announced::kKnown, step_);
    }
    const bool stranded = std::any_of(
        plans_.now.stages.begin(), plans_.now.stages.end(), [&](const plan::PlanStage& stage) {
          return !std::binary_search(kept.begin(), kept.end(), stage.rank.value);
        });
    if (event.failure || (stranded && !autonomous())) {
      spend(&TimeSpent::restart_s, scenario().training.restart_s);
    }
    const bool lost = event.failure && stranded && decides();
    const plan::Plan before = to_present(plans_.now, ranks_.present);
    if (stranded && !lost) DYNMO_TRY(vacate(kept, next));
    change_ranks(kept, next);
    if (lost) DYNMO_TRY(plan_after_loss(before));
    if (stranded) DYNMO_TRY(choose_recomputed());
    if (event.failure) go_back();
    for (const std::int64_t rank : event.slow) {
      ranks_.speeds[Rank(static_cast<std::int32_t>(rank))] = event.speed;
    }
    return event.slow.empty() ? Expected<void>() : set_grid(replicas());
  }

  Expected<void> set_grid(int replicas) {
    DYNMO_ASSIGN(Grid grid, make_grid(scenario().cluster, job_.device, replicas));
    replayer_.set_grid(slowed(std::move(grid), ranks_.speeds));
    return {};
  }

  // Moves the layers of ranks that are not among `kept`. A policy that is not autonomous, or has
  // measured nothing, makes a plan for the ranks of `next`.
  Expected<void> vacate(const std::vector<int>& kept, const std::vector<int>& next) {
    if (!decides()) {
      DYNMO_ASSIGN(plan::Plan plan, proposed(next, plans_.now.generation + 1));
      charge_plan();
      move_to(std::move(plan), Moves::kAtOnce);
      return {};
    }
    std::vector<Rank> staying;
    for (std::size_t i = 0; i < ranks_.present.size(); ++i) {
      if (std::binary_search(kept.begin(), kept.end(), ranks_.present[i])) {
        staying.emplace_back(static_cast<std::int32_t>(i));
      }
    }
    const plan::Plan current = to_present(plans_.now, ranks_.present);
    const cost::Cluster there = planned_ranks();
    DYNMO_ASSIGN(control::Decision decision, controller_.vacate(boundary(current, there), staying));
    return take(std::move(decision), Moves::kAtOnce);
  }

  // Plans for the ranks that are left, as a training does. `before` is the plan when ranks were
  // lost.
  Expected<void> plan_after_loss(const plan::Plan& before) {
    const cost::Cluster there = planned_ranks();
    DYNMO_ASSIGN(control::AfterLoss after, controller_.after_loss(boundary(before, there)));
    if (!after.fault.empty()) return make_error(ErrorCode::kInfeasible, "{}", after.fault);
    return take(std::move(after.decision), Moves::kAtOnce);
  }

  // Makes the ranks of `next` the present ones. Those of `kept` stay, and the others are new.
  void change_ranks(const std::vector<int>& kept, const std::vector<int>& next) {
    if (kept == ranks_.present && next == ranks_.present) return;
    std::vector<std::optional<Rank>> before;
    for (const int rank : next) {
      const auto place = std::lower_bound(ranks_.present.begin(), ranks_.present.end(), rank);
      before.push_back(std::binary_search(kept.begin(), kept.end(), rank)
                           ? std::optional(Rank(static_cast<std::int32_t>(
                                 std::distance(ranks_.present.begin(), place))))
                           : std::nullopt);
    }
    controller_.ranks_changed(before);
    ranks_.present = next;
    ++plans_.now.generation;  // also numbers groups
  }

  // Releases ranks that have had no layers for policy.release_after steps.
  void release() {
    const auto released = controller_.release(to_present(plans_.now, ranks_.present), step_);
    if (!released) return;
    std::vector<int> kept;
    for (const Rank rank : released->kept) kept.push_back(ranks_.present[rank.index()]);
    change_ranks(kept, kept);
  }

  // Sets the number of replicas. New ones receive the whole state of the model, each position its
  // own.
  Expected<void> set_replicas(int count) {
    const int added = count - replicas();
    DYNMO_TRY(set_grid(count));
    if (added <= 0) return {};
    std::vector<double> bytes(static_cast<std::size_t>(plans_.now.ranks), 0.0);
    double all = 0;
    for (std::int32_t i = 0; i < costs_.model.size(); ++i) {
      const LayerId layer{i};
      const auto state =
          static_cast<double>(plan::moved_bytes(costs_.model.layers[layer.index()]).value);
      bytes[plans_.now.owner(layer).index()] += state;
      all += state;
    }
    const double most = *std::max_element(bytes.begin(), bytes.end());
    charge_move(most);
    score_.count_bytes(all * added);
    return {};
  }

  void go_back() {
    const std::int64_t steps = score_.go_back();
    if (steps == 0) return;
    step_ -= steps;
    costs_.fresh = true;
    controller_.announce(cost::Announced::kWork, step_);
  }

  Expected<void> advance() {
    const auto announced = step_ > 0 ? load_.model.announced_at(step_) : cost::Announced::kNothing;
    const bool changed = announced != cost::Announced::kNothing;
    const bool sampled = step_ % scenario().training.sample_every == 0 || changed || costs_.fresh;
    if (sampled) {
      costs_.model = load_.model.at(step_);
      controller_.know(costs_.model);
    }
    controller_.announce(announced, step_);
    costs_.fresh = false;
    if (costs_.model.frozen_layers() != costs_.frozen) DYNMO_TRY(choose_recomputed());
    if (autonomous()) DYNMO_TRY(replan());
    const bool traced = step_ >= scenario().training.steps - options_.trace_steps;
    const plan::LayerSet& again = plans_.left ? costs_.recomputed_by_left : costs_.recomputed;
    DYNMO_ASSIGN(const StepMeasure* measure,
                 replayer_.step(plans_.of_step(), costs_.model, again,
                                traced ? Timelines::kKept : Timelines::kLeftOut));
    count(*measure);
    if (others_) DYNMO_TRY(others_->add(costs_.model));
    if (traced) {
      score_.keep(observe::TracedStep{.step = step_,
                                      .timeline = measure->timeline,
                                      .duration = to_nanoseconds(measure->step_s)});
    }
    if (autonomous()) {
      spend(&TimeSpent::profile_s, scenario().policy.profile_share * measure->step_s);
      if (sampled) observe();
    }
    if (options_.progress) options_.progress(step_);
    ++step_;
    const std::int64_t every = scenario().training.checkpoint_every;
    if (every > 0 && step_ % every == 0) score_.checkpoint();
    return {};
  }

  void count(const StepMeasure& measure) {
    const std::int64_t steps = scenario().training.steps;
    score_.count(measure, scenario().training.micro_batches * static_cast<double>(replicas()),
                 step_ >= steps - std::max<std::int64_t>(steps / 10, 1), held());
  }

  void observe() {
    controller_.observe(observed(), to_present(plans_.of_step(), ranks_.present),
                        costs_.model.frozen_layers());
  }

  cost::Observation observed() {
    if (load_.recording == nullptr) {
      const Measuring how{scenario(), policy_, load_.model.counts_work(), plans_.of_step(),
                          ranks_.speeds};
      cost::Observation seen = measured(how, step_, costs_.model);
      seen.steps = std::max<std::int64_t>(step_ - std::exchange(costs_.observed_step, step_), 1);
      return seen;
    }
    const auto found = load_.recording->steps.find(step_);
    // After the end of the recording the load does not change.
    return found != load_.recording->steps.end() ? found->second
                                                 : load_.recording->steps.rbegin()->second;
  }

  Expected<void> replan() {
    const cost::Cluster there = planned_ranks();
    const plan::Plan current = to_present(plans_.now, ranks_.present);
    DYNMO_ASSIGN(auto decision, controller_.decide(boundary(current, there)));
    plans_.left.reset();
    if (!decision) return {};
    if (!decision->migrate) costs_.recomputed = decision->recomputed;
    const Moves moves = decision->migrate ? how_to_move(current, decision->plan) : Moves::kAtOnce;
    if (moves == Moves::kDuringStep) plans_.left = plans_.now;
    return take(*std::move(decision), moves);
  }

  // Returns kDuringStep if the ranks' memory holds the layers twice, or if it was so in a
  // recording.
  [[nodiscard]] Moves how_to_move(const plan::Plan& from, const plan::Plan& to) const {
    const bool during =
        load_.recording != nullptr
            ? load_.recording->moving.contains(step_)
            : plan::holds_both(from, plan::difference(from, to, costs_.model),
                               {plan::recomputed(costs_.model, costs_.recomputed), planned_ranks(),
                                scenario().training.micro_batches});
    return during ? Moves::kDuringStep : Moves::kAtOnce;
  }

  RunResult finished() {
    RunResult result =
        std::move(score_).finished(scenario().training.steps, job_.tokens_per_micro_batch);
    if (others_) result.others = others_->times();
    return result;
  }

  const Job& job_;
  SimulatedLoad load_;
  const Policy& policy_;
  const RunOptions& options_;
  Costs costs_;
  control::Controller controller_;
  StepReplayer replayer_;
  Ranks ranks_;
  PlansInForce plans_;
  std::int64_t step_ = 0;
  Score score_;
  std::optional<OtherPlans> others_;
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
      run_options.progress(-1);  // -1: the run begins
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
  comparison.advice = advise(job);
  return comparison;
}

}  // namespace dynmo::scenario
