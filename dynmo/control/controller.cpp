// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/controller.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::control {
namespace {

constexpr std::int64_t kConfirmAfter = 3;  // steps
constexpr std::int64_t kLongestWait = 32;  // steps between two looks for drift
// Steps to the next known change, assumed until there were two.
constexpr std::int64_t kFirstInterval = 100;
constexpr std::int64_t kMinHorizon = 10;
constexpr int kMinSteps = 7;            // in the window, before a check for drift: bursts have 3
constexpr double kFruitless = 0.005;    // share of the time of training
constexpr double kCountedGrowth = 0.3;  // share of the minimum gain
constexpr int kMaxDoublings = 3;

}  // namespace

// A rank's part of the work of a plan.
struct Controller::RankWork {
  double share = 0;   // of the model's work
  double before = 0;  // the same at the last plan
  double noise = 0;   // std of the share for layers of relative std 1
};

namespace {

double sum_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// Adds up two independent noises. std::hypot would want glibc 2.35.
double root_of_squares(double a, double b) { return std::sqrt(a * a + b * b); }

// Returns the shares of the work, by stage.
std::vector<double> stage_shares(const plan::Plan& plan, const std::vector<double>& work) {
  const double total = sum_of(work);
  std::vector<double> shares;
  for (const plan::PlanStage& stage : plan.stages) {
    double sum = 0;
    for (int i = stage.layers.first.value; i < stage.layers.end(); ++i) {
      sum += work[static_cast<std::size_t>(i)];
    }
    shares.push_back(total > 0 ? sum / total : 0);
  }
  return shares;
}

// Returns the sums by rank of `values`, which are by stage.
std::map<Rank, double> by_rank(const std::vector<plan::PlanStage>& stages,
                               const std::vector<double>& values) {
  std::map<Rank, double> sums;
  for (std::size_t s = 0; s < stages.size(); ++s) sums[stages[s].rank] += values[s];
  return sums;
}

double largest(const std::map<Rank, double>& values) {
  double result = 0;
  for (const auto& [rank, value] : values) result = std::max(result, value);
  return result;
}

// Returns the time of the busiest rank, a lower bound of the step's time.
double busiest_s(const std::vector<cost::LayerSample>& layers, const plan::Plan& plan,
                 int micro_batches) {
  std::map<Rank, double> busy;
  const std::vector<Rank> owners = plan::owners(plan);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const cost::LayerTime& time = layers[i].time;
    busy[owners[i]] +=
        micro_batches * (time.forward_s + time.input_gradient_s + time.weight_gradient_s) +
        layers[i].update_s;
  }
  double most = 0;
  for (const auto& [rank, seconds] : busy) most = std::max(most, seconds);
  return most;
}

}  // namespace

cost::Cluster as_measured(cost::Cluster cluster, const cost::StepSample& overhead, int replicas,
                          int accumulation) {
  cluster.action_s = overhead.action_s.value_or(0);
  // Links between several nodes are measured separately, each at two sizes.
  const bool one_node =
      std::all_of(cluster.ranks.begin(), cluster.ranks.end(),
                  [&](const auto& rank) { return rank.node == cluster.ranks.front().node; });
  if (one_node) cluster.inside_node.latency_s = overhead.message_s.value_or(0);
  if (!overhead.reduction_bytes_per_s) return cluster;
  cluster.replicas = replicas;
  cluster.between_replicas.bandwidth_bytes_per_s = accumulation * *overhead.reduction_bytes_per_s;
  return cluster;
}

Controller::Controller(cost::ModelCost known, ControllerOptions options, std::int64_t first_step)
    : options_(options),
      profiler_(std::move(known), options.window, options.policy.minimum_gain),
      lasting_{.changed_step = first_step, .since = first_step} {}

void Controller::use(const Profiler& measured) {
  profiler_ = measured;
  pending_.known = pending_.measured_anew = pending_.first = profiler_.steps() > 0;
}

void Controller::observe(const cost::Observation& step, const plan::Plan& plan, int frozen_layers) {
  charges_ = step.charges;
  if (budget_.planned && !budget_.moved) budget_.fruitless_s += charges_.plan_s;
  budget_.planned = budget_.moved = pending_.waiting = false;
  forgone_.sum_s += static_cast<double>(step.steps) * forgone_.a_step_s;
  observed_ += step.steps;
  budget_.trained_s += static_cast<double>(step.steps) *
                       busiest_s(step.layers, plan, options_.micro_batches * options_.accumulation);
  const std::vector<Rank> owners = plan::owners(plan);
  if (pending_.speed) pending_.speed->steps += step.steps;
  note_speeds(speeds_.add(step.layers, owners, step.steps));
  if (auto found = profiler_.add(speeds_.at_full_speed(step.layers, owners), owners, step.overhead,
                                 frozen_layers)) {
    speeds_.scale(found->factors, found->steps);
    pending_.found = std::move(found);
  }
  if (drift_.work.empty()) drift_.work = profiler_.work();
}

// Corrects the times in the profiler, which does not have the newest step yet.
void Controller::note_speeds(const std::vector<SpeedChange>& changes) {
  for (const SpeedChange& change : changes) {
    profiler_.scale(change.rank, change.before / change.factor, change.samples - 1);
    pending_.speed = change;
  }
}

void Controller::announce(cost::Announced what, std::int64_t step) {
  if (what == cost::Announced::kNothing) return;
  if (what != cost::Announced::kKnown) speeds_.restart();
  if (what == cost::Announced::kWork) {
    profiler_.restart();
    pending_.waiting = true;
  }
  if (what != cost::Announced::kKnown) pending_.measured_anew = true;
  pending_.known = true;
  pending_.first = pending_.ranks = false;
  pending_.found.reset();
  pending_.confirm_at.reset();
  if (step > lasting_.changed_step) lasting_.interval = step - lasting_.changed_step;
  lasting_.changed_step = step;
  lasting_.known = true;
}

std::optional<cost::ModelCost> Controller::costs(const cost::ModelCost& known,
                                                 const plan::LayerSet& recomputed) const {
  auto model = profiler_.costs(known);
  if (!model) return model;
  for (cost::LayerCost& layer : model->layers) layer.update_s /= options_.accumulation;
  return plan::recomputed(*std::move(model), recomputed);
}

std::optional<Cause> Controller::cause(std::int64_t step) const {
  if (profiler_.steps() == 0 || pending_.waiting) return std::nullopt;
  if (pending_.known) return Cause::kKnown;
  if (pending_.confirm_at && observed_ >= *pending_.confirm_at) return Cause::kConfirmed;
  const double expected_s = forgone_.a_step_s * horizon_steps(Cause::kWaited, step);
  if (forgone_.a_step_s > 0 && forgone_.sum_s + expected_s > forgone_.cost_s) {
    return Cause::kWaited;
  }
  if (observed_ == drift_.decided_at) return std::nullopt;
  if (pending_.found || pending_.speed) return Cause::kFound;
  if (observed_ >= drift_.look_at && profiler_.steps() >= kMinSteps) return Cause::kDrift;
  return std::nullopt;
}

// Returns the work of the ranks under the current plan, now and at the last plan. Requires that the
// last plan was the current one.
std::map<Rank, Controller::RankWork> Controller::rank_work(const Boundary& now,
                                                           const std::vector<double>& work) const {
  const double total = sum_of(work);
  std::map<Rank, RankWork> ranks;
  for (const auto& [rank, share] : by_rank(now.plan.stages, stage_shares(now.plan, work))) {
    ranks[rank].share = share;
  }
  for (const auto& [rank, share] : by_rank(drift_.stages, drift_.shares)) {
    ranks[rank].before = share;
  }
  const std::vector<Rank> owners = plan::owners(now.plan);
  for (std::size_t i = 0; i < work.size() && total > 0; ++i) {
    double& noise = ranks[owners[i]].noise;
    noise = root_of_squares(noise, work[i] / total);
  }
  return ranks;
}

// Returns whether another plan is affordable although the last ones led to no move. Such plans have
// a share of the training time. More are allowed if the busiest rank's growth since the last plan,
// beyond noise, costs more over the horizon than a plan.
bool Controller::affords(Cause cause, const Boundary& now, const cost::ModelCost& costs) const {
  if (cause != Cause::kFound && cause != Cause::kDrift) return true;
  if (budget_.fruitless_s <= kFruitless * budget_.trained_s) return true;
  if (drift_.shares.empty() || drift_.stages != now.plan.stages) return false;
  const std::vector<double> work = cost::layer_work_s(costs, options_.micro_batches);
  double before = 0;
  double after = 0;
  for (const auto& [rank, of_rank] : rank_work(now, work)) {
    before = std::max(before, of_rank.before);
    after = std::max(after, of_rank.share - noise_of(of_rank));
  }
  const double step_s = sum_of(work) * options_.micro_batches * options_.accumulation;
  return (after - before) * step_s * horizon_steps(cause, now.step) > charges_.plan_s;
}

// Returns whether the busiest rank's counted work has grown since the last plan, so that a move may
// pay now. Both times use the same rates, so noise adds nothing. A plan gains at most the last
// plan's prediction and the busiest rank's growth since. Each plan with too little gain doubles the
// required growth.
bool Controller::counted(const Boundary& now, const cost::ModelCost& costs) const {
  const std::vector<double>& count = profiler_.work();
  if (drift_.work.size() != count.size() || observed_ == drift_.decided_at) return false;
  const std::vector<double> work = cost::layer_work_s(costs, options_.micro_batches);
  std::vector<double> before = work;
  for (std::size_t i = 0; i < count.size(); ++i) {
    if (count[i] > 0 && drift_.work[i] > 0) before[i] *= drift_.work[i] / count[i];
  }
  if (before == work) return false;
  const auto busiest = [&](const std::vector<double>& of_layers) {
    return largest(by_rank(now.plan.stages, stage_shares(now.plan, of_layers)));
  };
  const double after = busiest(work);
  const double growth = after - busiest(before);
  const double wanted = std::ldexp(kCountedGrowth, std::min(drift_.fruitless, kMaxDoublings));
  if (!(growth > wanted * options_.policy.minimum_gain * after)) return false;
  const double step_s = sum_of(work) * options_.micro_batches * options_.accumulation;
  const double horizon = horizon_steps(Cause::kCounted, now.step);
  const double move_s = forgone_.a_step_s > 0 ? forgone_.cost_s : charges_.move_fixed_s;
  return growth * step_s * horizon > charges_.plan_s &&
         (drift_.gain_s + growth * step_s) * horizon + forgone_.sum_s > move_s + charges_.plan_s;
}

// Returns the noise of the difference of two measured shares of a rank.
double Controller::noise_of(const RankWork& work) const {
  return std::sqrt(2.0) * root_of_squares(profiler_.relative_noise() * work.noise,
                                          profiler_.rank_noise() * work.share);
}

// Returns whether a rank's share of the work has changed since the last plan, by more than the
// minimum gain and noise. Also returns true if noise prevented a move and the window has since
// doubled.
bool Controller::drifted(const Boundary& now, const cost::ModelCost& costs) const {
  if (drift_.shares.empty() || drift_.stages != now.plan.stages) return true;
  if (drift_.noisy_window > 0 && profiler_.steps() >= 2 * drift_.noisy_window) return true;
  const std::vector<double> work = cost::layer_work_s(costs, options_.micro_batches);
  for (const auto& [rank, of_rank] : rank_work(now, work)) {
    const double change = std::abs(of_rank.share - of_rank.before);
    if (change > options_.policy.minimum_gain * of_rank.share && change > noise_of(of_rank)) {
      return true;
    }
  }
  return false;
}

// Returns the number of steps for which a gain is expected to last. It is the time that the current
// plan has lasted. After a known change it is at least the time between the last two. It never
// exceeds the rest of the run.
double Controller::horizon_steps(Cause cause, std::int64_t step) const {
  std::int64_t horizon = options_.horizon_steps;
  if (horizon == 0) horizon = step - lasting_.since;
  const bool known = cause == Cause::kKnown || (cause == Cause::kConfirmed && lasting_.known);
  if (options_.horizon_steps == 0 && known) {
    horizon = std::max(horizon, lasting_.interval > 0 ? lasting_.interval : kFirstInterval);
  }
  horizon = std::max(horizon, kMinHorizon);
  return static_cast<double>(std::max<std::int64_t>(std::min(horizon, options_.steps - step), 0));
}

// Returns the cause whose evidence a move needs. A found change that was measured again counts as
// kFound, and an announced one with measured costs as kConfirmed.
Cause Controller::evidence(Cause cause) const {
  if (cause == Cause::kConfirmed && !lasting_.known) return Cause::kFound;
  return cause == Cause::kKnown && pending_.measured_anew ? Cause::kConfirmed : cause;
}

PolicyInput Controller::input(Cause cause, const Boundary& now, const cost::Cluster& ranks,
                              const cost::ModelCost& costs) const {
  return {.current = now.plan,
          .model = costs,
          .relative_noise = root_of_squares(profiler_.relative_noise(), profiler_.work_noise()),
          .cluster = ranks,
          .micro_batches = options_.micro_batches,
          .horizon_steps = options_.accumulation * horizon_steps(cause, now.step),
          .bytes_per_s = charges_.bytes_per_s,
          .fixed_cost_s = charges_.plan_s + charges_.move_fixed_s,
          .cause = evidence(cause),
          .forgone_s = forgone_.sum_s,
          .rank_noise = profiler_.rank_noise(),
          .recomputed = now.recomputed,
          .all_ranks = static_cast<int>(lasting_.ranks)};
}

Expected<std::optional<Decision>> Controller::decide(const Boundary& now) {
  std::optional<Cause> cause = this->cause(now.step);
  const bool counts = profiler_.steps() > 0 && !pending_.waiting && !profiler_.work().empty() &&
                      profiler_.work() != drift_.work;
  if (!cause && !counts) return std::optional<Decision>();
  lasting_.ranks = std::max<std::int64_t>(lasting_.ranks, now.cluster.size());
  const cost::ModelCost plain = *this->costs(now.known);
  const cost::ModelCost costs = plan::recomputed(plain, now.recomputed);
  if ((!cause || *cause == Cause::kDrift) && counts && counted(now, costs)) {
    cause = Cause::kCounted;
  }
  if (!cause) return std::optional<Decision>();
  if (!affords(*cause, now, costs)) return std::optional<Decision>();
  if (*cause == Cause::kDrift && !drifted(now, costs)) {
    drift_.wait = std::min(2 * drift_.wait, kLongestWait);
    drift_.look_at = observed_ + drift_.wait;
    return std::optional<Decision>();
  }
  const cost::Cluster ranks = speeds_.slowed(now.cluster);
  DYNMO_ASSIGN(Decision decision,
               control::decide(input(*cause, now, ranks, plain), options_.policy));
  remember(*cause, now, plain, decision);
  return std::optional<Decision>(std::move(decision));
}

void Controller::remember(Cause cause, const Boundary& now, const cost::ModelCost& costs,
                          Decision& decision) {
  for (double* time : {&decision.current_step_s, &decision.planned_step_s, &decision.noise_s}) {
    *time *= options_.accumulation;
  }
  decision.why = why(cause, now);
  budget_.planned = true;
  budget_.moved = decision.migrate;
  drift_.decided_at = observed_;
  // Released ranks are worth their time if the policy releases any.
  const double gain_s = options_.policy.rank_use == RankUse::kFewest
                            ? gain_of_step(decision)
                            : decision.current_step_s - decision.planned_step_s;
  if (decision.too_expensive) {
    forgone_.a_step_s = gain_s;
    forgone_.cost_s = decision.cost_s;
  } else {
    forgone_.a_step_s = forgone_.sum_s = 0;
  }
  drift_.gain_s = decision.migrate ? 0 : std::max(0.0, gain_s);
  drift_.fruitless = decision.migrate ? 0 : drift_.fruitless + (decision.too_expensive ? 0 : 1);
  drift_.noisy_window = decision.within_noise ? profiler_.steps() : 0;
  drift_.stages = decision.plan.stages;
  drift_.shares = stage_shares(
      decision.plan,
      cost::layer_work_s(plan::recomputed(costs, decision.recomputed), options_.micro_batches));
  drift_.work = profiler_.work();
  const bool drift = cause == Cause::kDrift;
  drift_.wait = drift && !decision.migrate ? std::min(2 * drift_.wait, kLongestWait) : 1;
  drift_.look_at = observed_ + drift_.wait;
  pending_.confirm_at.reset();
  const bool found = cause == Cause::kFound && pending_.found;  // not a speed alone
  if ((cause == Cause::kKnown && pending_.measured_anew) || found) {
    pending_.confirm_at = observed_ + kConfirmAfter;
  }
  if (cause == Cause::kFound) lasting_.known = false;
  if (decision.migrate) lasting_.since = now.step;
  pending_.known = pending_.measured_anew = pending_.first = pending_.ranks = false;
  pending_.found.reset();
  pending_.speed.reset();
}

std::string Controller::why(Cause cause, const Boundary& now) const {
  const auto name_of = [&](Rank rank) {
    return now.names.empty() ? fmt::format("rank {}", rank) : now.names[rank.index()];
  };
  switch (cause) {
    case Cause::kKnown:
      if (pending_.first) return "the first costs were measured";
      return pending_.ranks ? "ranks have come or gone" : "the work has changed";
    case Cause::kLost:
      return kRanksLost;
    case Cause::kConfirmed:
      return "measured again since the change";
    case Cause::kFound:
      if (pending_.speed) {
        return fmt::format("layers on {} take {:.2f} x their time at full speed since step {}",
                           name_of(pending_.speed->rank), pending_.speed->factor,
                           std::max<std::int64_t>(now.step - pending_.speed->steps, 0));
      }
      if (pending_.found->layer) {
        return fmt::format("'{}' takes {:.2f} x as long",
                           now.known.layers[pending_.found->layer->index()].name,
                           pending_.found->factor);
      }
      return fmt::format("the layers of {} take {:.2f} x as long", name_of(*pending_.found->rank),
                         pending_.found->factor);
    case Cause::kWaited:
      return "the gain has persisted";
    case Cause::kCounted:
      return "the work has changed, as counted";
    case Cause::kDrift:
      return "the work has drifted";
  }
  DYNMO_CHECK(false, "a cause, got {}", static_cast<int>(cause));
}

}  // namespace dynmo::control
