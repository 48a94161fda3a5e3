// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "dynmo/core/check.h"
#include "dynmo/core/median.h"
#include "dynmo/core/rng.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/propose.h"
#include "dynmo/scenario/controller_impl.h"
#include "dynmo/scenario/grid.h"

namespace dynmo::scenario {
namespace {

constexpr std::int64_t kLongestWait = 256;
constexpr std::int64_t kFirstHorizon = 100;

struct StageWork {
  std::vector<double> share;  // of the model's work
  std::vector<double> noise;  // deviation of a share for layers of relative deviation 1
};

StageWork stage_work(const plan::Plan& plan, const cost::ModelCost& model, int micro_batches) {
  const std::vector<double> work = cost::layer_work_s(model, micro_batches);
  const double total = std::accumulate(work.begin(), work.end(), 0.0);
  StageWork result;
  for (const plan::PlanStage& stage : plan.stages) {
    double sum = 0;
    double squares = 0;
    for (int i = stage.layers.first.value; i < stage.layers.end(); ++i) {
      const double w = work[static_cast<std::size_t>(i)];
      sum += w;
      squares += w * w;
    }
    result.share.push_back(total > 0 ? sum / total : 0);
    result.noise.push_back(total > 0 ? std::sqrt(squares) / total : 0);
  }
  return result;
}

}  // namespace

plan::Plan to_present(const plan::Plan& plan, const std::vector<int>& present) {
  std::vector<int> index(static_cast<std::size_t>(plan.ranks), -1);
  for (std::size_t i = 0; i < present.size(); ++i) {
    index[static_cast<std::size_t>(present[i])] = static_cast<int>(i);
  }
  plan::Plan result = plan;
  result.ranks = static_cast<int>(present.size());
  for (plan::PlanStage& stage : result.stages) {
    const int rank = index[stage.rank.index()];
    DYNMO_CHECK(rank >= 0, "stages on ranks that are there, got one on {}", stage.rank.value);
    stage.rank = Rank{rank};
  }
  result.order.clear();
  for (const int rank : present) {
    if (!plan.order.empty()) result.order.push_back(plan.order[static_cast<std::size_t>(rank)]);
  }
  return result;
}

plan::Plan to_all(const plan::Plan& plan, const std::vector<int>& present, int ranks) {
  plan::Plan result = plan;
  result.ranks = ranks;
  for (plan::PlanStage& stage : result.stages) stage.rank = Rank{present[stage.rank.index()]};
  if (plan.order.empty()) return result;
  result.order.assign(static_cast<std::size_t>(ranks), {});
  for (std::size_t i = 0; i < present.size(); ++i) {
    result.order[static_cast<std::size_t>(present[i])] = plan.order[i];
  }
  return result;
}

plan::ProposeOptions Controller::proposing() const {
  plan::ProposeOptions options;
  if (scenario_.policy.evaluations > 0) options.evaluations = scenario_.policy.evaluations;
  // A search finds the schedule, too.
  if (policy_.balancer == plan::Balancer::kSearch) {
    options.schedules = plan::ScheduleChoice::kBest;
  }
  return options;
}

Expected<plan::Plan> Controller::propose(const cost::ModelCost& model, const cost::Cluster& cluster,
                                         const std::vector<int>& present,
                                         Generation generation) const {
  DYNMO_ASSIGN(const schedule::ScheduleKind kind,
               schedule::parse_schedule_kind(scenario_.training.schedule));
  const cost::Cluster there = subset(cluster, present);
  const plan::BalanceProblem problem{.model = model,
                                     .cluster = there,
                                     .micro_batches = scenario_.training.micro_batches,
                                     .schedule = kind};
  plan::Plan plan;
  if (policy_.balancer == plan::Balancer::kUniform) {  // the baseline, whether it fits or not
    DYNMO_ASSIGN(const std::vector<int> counts, plan::balance(policy_.balancer, problem));
    plan = plan::make_plan(counts, plan::placement(policy_.balancer, problem), there.size(), kind);
  } else {
    DYNMO_ASSIGN(plan::Proposal proposal, plan::propose(policy_.balancer, problem, proposing()));
    plan = std::move(proposal.plan);
  }
  plan.generation = generation;
  return to_all(plan, present, cluster.size());
}

void Controller::known_change(std::int64_t step) {
  if (known_step_ > 0 && step > known_step_) known_interval_ = step - known_step_;
  known_step_ = step;
  known_ = true;
  seen_.clear();  // of another model
}

// A layer's times of one step share their noise: it comes from the machine's clock and neighbours.
void Controller::measure(std::int64_t step, const cost::ModelCost& truth) {
  cost::ModelCost measured = truth;
  for (std::size_t i = 0; i < measured.layers.size(); ++i) {
    Rng rng(mix_key({static_cast<std::uint64_t>(scenario_.training.seed), 0x70726f66,
                     static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(step)}));
    const double factor = std::max(0.0, 1 + scenario_.policy.noise * rng.normal());
    cost::LayerCost& layer = measured.layers[i];
    layer.forward_s *= factor;
    layer.backward_input_s *= factor;
    layer.backward_weight_s *= factor;
    layer.update_s *= factor;
  }
  seen_.push_back(std::move(measured));
  if (seen_.size() > static_cast<std::size_t>(scenario_.policy.window)) seen_.pop_front();
}

cost::ModelCost Controller::medians() const {
  cost::ModelCost model = seen_.back();
  if (seen_.size() == 1) return model;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    for (const auto field : {&cost::LayerCost::forward_s, &cost::LayerCost::backward_input_s,
                             &cost::LayerCost::backward_weight_s, &cost::LayerCost::update_s}) {
      std::vector<double> values;
      for (const cost::ModelCost& seen : seen_) values.push_back(seen.layers[i].*field);
      model.layers[i].*field = median(std::move(values));
    }
  }
  return model;
}

// Deviation of a median of n normal values: 1.2533 / sqrt(n) of one's, for n that is not small.
double Controller::relative_noise() const {
  const auto n = static_cast<double>(seen_.size());
  return scenario_.policy.noise * std::min(1.0, 1.2533 / std::sqrt(n));
}

// Whether a stage's share of the work has changed by more than the least gain and three deviations
// since the last decision.
bool Controller::drifted(const plan::Plan& plan, const cost::ModelCost& seen) const {
  const StageWork now = stage_work(plan, seen, scenario_.training.micro_batches);
  if (reference_plan_.stages != plan.stages) return true;
  for (std::size_t s = 0; s < now.share.size(); ++s) {
    const double change = std::abs(now.share[s] - reference_[s]);
    const double noise = 3 * std::sqrt(2.0) * relative_noise() * now.noise[s];
    if (change > scenario_.policy.minimum_gain * now.share[s] && change > noise) return true;
  }
  return false;
}

// A gain is expected to last as long as the loads before it did: known changes as long as the last
// two were apart, drift as long as it took to come up. Never beyond the end of the run.
double Controller::horizon_steps(std::int64_t step) const {
  const std::int64_t left = scenario_.training.steps - step - 1;
  std::int64_t horizon = scenario_.policy.horizon_steps;
  if (horizon == 0 && known_) horizon = known_interval_ > 0 ? known_interval_ : kFirstHorizon;
  if (horizon == 0) horizon = std::max(step - decided_step_, scenario_.training.sample_every);
  return static_cast<double>(std::min(horizon, left));
}

void Controller::remember(std::int64_t step, const plan::Plan& plan, const cost::ModelCost& seen) {
  known_ = false;
  decided_step_ = step;
  reference_plan_ = plan;
  reference_ = stage_work(plan, seen, scenario_.training.micro_batches).share;
}

Expected<std::optional<control::Decision>> Controller::consider(std::int64_t step,
                                                                const plan::Plan& current,
                                                                const cost::Cluster& cluster,
                                                                const std::vector<int>& present) {
  const cost::ModelCost seen = medians();
  const bool packs = policy_.rank_use == control::RankUse::kFewest;
  if (reference_.empty() && packs) known_ = true;  // the first plan is on all ranks
  if (reference_.empty() && !packs) {              // ... and was made for these costs
    remember(step, current, seen);
    return std::optional<control::Decision>();
  }
  if (!known_ && (step - decided_step_ < wait_ || !drifted(current, seen))) {
    return std::optional<control::Decision>();
  }
  const Scenario::Policy& p = scenario_.policy;
  const cost::Cluster there = subset(cluster, present);
  DYNMO_ASSIGN(
      control::Decision decision,
      control::decide({.current = to_present(current, present),
                       .model = seen,
                       .relative_noise = relative_noise(),
                       .cluster = there,
                       .micro_batches = scenario_.training.micro_batches,
                       .horizon_steps = horizon_steps(step),
                       .bytes_per_s = p.move_bandwidth,
                       .fixed_cost_s = p.plan_s + p.move_fixed_s,
                       .change = known_ ? control::Change::kKnown : control::Change::kMeasured},
                      {.balancer = policy_.balancer,
                       .minimum_gain = p.minimum_gain,
                       .noise_factor = p.noise_factor,
                       .rank_use = policy_.rank_use,
                       .pack_slack = p.pack_slack,
                       .propose = proposing()}));
  // Where drift was not worth a move, the next look is twice as far away: planning costs little in
  // the end, whatever the loads do.
  wait_ = decision.migrate || known_ ? 1 : std::min(2 * wait_, kLongestWait);
  decision.plan = to_all(decision.plan, present, cluster.size());
  remember(step, decision.plan, seen);
  return std::optional<control::Decision>(std::move(decision));
}

}  // namespace dynmo::scenario
