// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/policy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/pack.h"

namespace dynmo::control {
namespace {

constexpr double kAssumedBytesPerSecond = 1e9;

Expected<void> validate(const PolicyInput& input, const PolicyOptions& options) {
  const std::array<std::pair<std::string_view, double>, 9> values = {{
      {"relative_noise", input.relative_noise},
      {"rank_noise", input.rank_noise},
      {"horizon_steps", input.horizon_steps},
      {"bytes_per_s", input.bytes_per_s},
      {"fixed_cost_s", input.fixed_cost_s},
      {"forgone_s", input.forgone_s},
      {"minimum_gain", options.minimum_gain},
      {"noise_factor", options.noise_factor},
      {"pack_slack", options.pack_slack},
  }};
  for (const auto& [field, value] : values) {
    if (std::isfinite(value) && value >= 0) continue;
    return make_error(ErrorCode::kBadInput, "policy: {} is {}, wanted a number, 0 or more", field,
                      value);
  }
  return {};
}

// One of the two plans that are compared.
struct Rival {
  const plan::Plan& plan;
  const cost::ModelCost& model;  // with the layers that it recomputes
};

// Returns the work / speed of the layers of the plan's slowest rank, and 0 for other layers.
std::vector<double> bottleneck_work_s(const Rival& rival, const PolicyInput& input) {
  const auto times = rank_times_s(rival.plan, {rival.model, input.cluster, input.micro_batches});
  const Rank slowest(
      static_cast<int>(std::max_element(times.begin(), times.end()) - times.begin()));
  std::vector<double> work = cost::layer_work_s(rival.model, input.micro_batches);
  const std::vector<Rank> owner = owners(rival.plan);
  for (std::size_t i = 0; i < work.size(); ++i) {
    work[i] = owner[i] == slowest ? work[i] / input.cluster.ranks[slowest.index()].speed : 0;
  }
  return work;
}

// Returns the std of the difference of two plans' step times (PolicyOptions).
double noise_s(const PolicyInput& input, const Rival& current, const Rival& planned) {
  const std::vector<double> now = bottleneck_work_s(current, input);
  const std::vector<double> then = bottleneck_work_s(planned, input);
  const std::vector<Rank> owner = owners(input.current);
  double of_layers = 0;
  std::vector<double> of_rank(static_cast<std::size_t>(input.current.ranks));
  for (std::size_t i = 0; i < now.size(); ++i) {
    of_layers += now[i] * now[i] + then[i] * then[i];
    of_rank[owner[i].index()] += now[i] - then[i];
  }
  double of_ranks = 0;
  for (const double difference : of_rank) of_ranks += difference * difference;
  return input.micro_batches * std::sqrt(input.relative_noise * input.relative_noise * of_layers +
                                         input.rank_noise * input.rank_noise * of_ranks);
}

double percent(double share) { return 100 * share; }

Decision keep(Decision decision, std::string reason) {
  decision.migrate = false;
  decision.reason = std::move(reason);
  return decision;
}

// Returns "1.20 ms -> 1.00 ms a step (16.7 %)".
std::string gain_text(const Decision& decision) {
  const double gain = decision.current_step_s - decision.planned_step_s;
  return fmt::format("{} -> {} a step ({:.1f} %)", format_seconds(decision.current_step_s),
                     format_seconds(decision.planned_step_s),
                     percent(gain / decision.current_step_s));
}

int ranks_used(const plan::Plan& plan) {
  return static_cast<int>(plan::ranks_at_work(plan).size());
}

plan::BalanceProblem problem_of(const PolicyInput& input, const PolicyOptions& options) {
  plan::BalanceProblem problem{{input.model, input.cluster, input.micro_batches},
                               input.current.schedule};
  problem.current = &input.current;
  problem.recompute = options.recompute;
  const int used = ranks_used(input.current);
  if (used > 0) {
    problem.stages_per_rank = std::max(1, static_cast<int>(input.current.stages.size()) / used);
  }
  return problem;
}

// Returns the seconds of a step on `all_ranks` ranks, some of which have been released, or 0 if
// there is no such plan. A slack relative to the remaining ranks would add up over several
// releases.
double reference_step_s(const plan::BalanceProblem& problem, const PolicyOptions& options,
                        int all_ranks) {
  if (all_ranks <= problem.cluster.size()) return 0;
  cost::Cluster all = problem.cluster;
  all.ranks.resize(static_cast<std::size_t>(all_ranks), all.ranks.front());
  const plan::BalanceProblem on_all{{problem.model, all, problem.micro_batches},
                                    problem.schedule,
                                    problem.stages_per_rank,
                                    nullptr,
                                    problem.recompute};
  const auto proposal = propose(options.balancer, on_all, options.propose);
  return proposal ? proposal->evaluation.step_time_s : 0;
}

Expected<plan::Proposal> proposed(const plan::BalanceProblem& problem, const PolicyOptions& options,
                                  int all_ranks) {
  if (options.rank_use == RankUse::kAll) {
    return propose(options.balancer, problem, options.propose);
  }
  DYNMO_ASSIGN(plan::Packing packing,
               pack(options.balancer, problem,
                    {.slack = options.pack_slack,
                     .reference_step_s = reference_step_s(problem, options, all_ranks),
                     .propose = options.propose}));
  return std::move(packing.proposal);
}

// Returns the balancer's plan, on few ranks if asked. It uses 1F1B if the current schedule cannot
// have that number of ranks for these layers.
Expected<plan::Proposal> proposed(const PolicyInput& input, const PolicyOptions& options) {
  plan::BalanceProblem problem = problem_of(input, options);
  auto found = proposed(problem, options, input.all_ranks);
  if (found || found.error().code != ErrorCode::kBadInput) return found;
  problem.schedule = schedule::ScheduleKind::k1F1B;
  problem.stages_per_rank = 1;
  return proposed(problem, options, input.all_ranks);
}

struct Rivals {
  plan::Plan plan;
  plan::LayerSet recomputed;      // under it
  cost::ModelCost current_model;  // each with what is recomputed
  cost::ModelCost planned_model;
  plan::Evaluation current;
  plan::Evaluation planned;
};

// Returns the rivals with only the current plan's side filled in.
Expected<Rivals> rivals_of(const PolicyInput& input) {
  Rivals rivals;
  rivals.current_model = plan::recomputed(input.model, input.recomputed);
  DYNMO_ASSIGN(rivals.current, plan::evaluate_recomputed(
                                   input.current, {input.model, input.cluster, input.micro_batches},
                                   input.recomputed));
  return rivals;
}

void enter(Rivals& rivals, plan::Proposal proposal, const PolicyInput& input) {
  rivals.plan = std::move(proposal.plan);
  rivals.recomputed = std::move(proposal.recomputed);
  rivals.planned_model = plan::recomputed(input.model, rivals.recomputed);
  rivals.planned = std::move(proposal.evaluation);
}

Decision take(Decision decision, const Rivals& rivals, std::string reason) {
  decision.migrate = true;
  decision.plan = rivals.plan;
  decision.recomputed = rivals.recomputed;
  decision.reason = std::move(reason);
  return decision;
}

// Returns the apparent gain of moving layers away from a rank that only noise made the slowest. The
// largest of n equal values with noise is about sqrt(2 ln n) standard deviations above the mean.
// Ranks within 3 standard deviations count, because noise may have put them below it.
double chance_gain_s(const PolicyInput& input, const Rivals& rivals, const Decision& decision) {
  if (input.cause == Cause::kKnown) return 0;
  const auto times =
      rank_times_s(input.current, {rivals.current_model, input.cluster, input.micro_batches});
  const double slowest = *std::max_element(times.begin(), times.end());
  const auto equal = std::count_if(times.begin(), times.end(), [&](double time) {
    return time > 0 && time >= (1 - 3 * input.rank_noise) * slowest;
  });
  return input.rank_noise * std::sqrt(2 * std::log(static_cast<double>(equal))) *
         decision.current_step_s;
}

double noise_factor(Cause cause, const PolicyOptions& options) {
  switch (cause) {
    case Cause::kKnown:
    case Cause::kLost:
    case Cause::kConfirmed:
    case Cause::kCounted:
      return options.noise_factor / 5;
    case Cause::kFound:
    case Cause::kWaited:
      return options.noise_factor * 3 / 5;
    case Cause::kDrift:
      return options.noise_factor;
  }
  DYNMO_CHECK(false, "a cause, got {}", static_cast<int>(cause));
}

// Returns the minimum gain, which is smaller if sources count the work: such a gain is no artefact
// of measuring.
double minimum_gain(Cause cause, const PolicyOptions& options) {
  constexpr double kOfCounted = 0.3;
  return cause == Cause::kCounted ? kOfCounted * options.minimum_gain : options.minimum_gain;
}

Decision weigh(Decision decision, const Rivals& proposal, const PolicyInput& input,
               const PolicyOptions& options) {
  const std::string cuts =
      fmt::format("{} to {}", to_string(input.current), to_string(proposal.plan));
  if (!plan::fits_memory(proposal.current.result, input.cluster)) {
    std::string reason = fmt::format("move {}: the current plan no longer fits the memory, {}",
                                     cuts, gain_text(decision));
    return take(std::move(decision), proposal, std::move(reason));
  }
  const double gain = gain_of_step(decision);
  const auto refuse = [&](std::string why) {
    return keep(decision, fmt::format("keep {}: {} would give {}, {}", to_string(input.current),
                                      to_string(proposal.plan), gain_text(decision), why));
  };
  const double least = minimum_gain(input.cause, options);
  if (!(gain > least * decision.current_step_s)) {
    return refuse(fmt::format("wanted more than {:.1f} %", percent(least)));
  }
  const double factor = noise_factor(input.cause, options);
  const double noise = factor * decision.noise_s + chance_gain_s(input, proposal, decision);
  if (!(gain > noise)) {
    decision.within_noise = true;
    return refuse(fmt::format("within the noise of {}", format_seconds(noise)));
  }
  if (!(decision.gain_s + input.forgone_s > decision.cost_s)) {
    decision.too_expensive = true;
    return refuse(fmt::format("{} over {:.0f} steps, less than the {} of moving {} layers, {}",
                              format_seconds(decision.gain_s), input.horizon_steps,
                              format_seconds(decision.cost_s), decision.migration.moves.size(),
                              format_bytes(decision.migration.bytes())));
  }
  const std::string ranks =
      decision.ranks_before == decision.ranks_after
          ? ""
          : fmt::format(", {} -> {} ranks", decision.ranks_before, decision.ranks_after);
  std::string reason =
      fmt::format("move {}: {}{}, imbalance {:.1f} -> {:.1f} %, {} layers, {}, gains {} for {}",
                  cuts, gain_text(decision), ranks, percent(decision.imbalance_before),
                  percent(decision.imbalance_after), decision.migration.moves.size(),
                  format_bytes(decision.migration.bytes()), format_seconds(decision.gain_s),
                  format_seconds(decision.cost_s));
  return take(std::move(decision), proposal, std::move(reason));
}

// Returns the decision to stay, before there is a proposal.
Decision keeping(const PolicyInput& input, const plan::Evaluation& current) {
  Decision decision;
  decision.plan = input.current;
  decision.recomputed = input.recomputed;
  decision.current_step_s = decision.planned_step_s = current.step_time_s;
  decision.imbalance_before = decision.imbalance_after = current.imbalance;
  decision.ranks_before = decision.ranks_after = ranks_used(input.current);
  return decision;
}

// Fills in the gain of the plan that was found, and the cost of moving to it.
void compare(Decision& decision, const Rivals& rivals, const PolicyInput& input) {
  decision.ranks_after = ranks_used(rivals.plan);
  decision.planned_step_s = rivals.planned.step_time_s;
  decision.imbalance_after = rivals.planned.imbalance;
  decision.migration = difference(input.current, rivals.plan, input.model);
  decision.gain_s = gain_of_step(decision) * input.horizon_steps;
  const double bandwidth = input.bytes_per_s > 0 ? input.bytes_per_s : kAssumedBytesPerSecond;
  decision.cost_s =
      static_cast<double>(decision.migration.bytes().value) / bandwidth + input.fixed_cost_s;
  decision.noise_s =
      noise_s(input, {input.current, rivals.current_model}, {rivals.plan, rivals.planned_model});
}

}  // namespace

double gain_of_step(const Decision& decision) {
  const double used = decision.ranks_after < decision.ranks_before
                          ? static_cast<double>(decision.ranks_after) / decision.ranks_before
                          : 1;
  return decision.current_step_s - decision.planned_step_s * used;
}

Expected<Decision> decide(const PolicyInput& input, const PolicyOptions& options) {
  DYNMO_TRY(validate(input, options));
  DYNMO_ASSIGN(Rivals rivals, rivals_of(input));
  Decision decision = keeping(input, rivals.current);
  auto found = proposed(input, options);
  if (!found && (found.error().code == ErrorCode::kInfeasible ||
                 found.error().code == ErrorCode::kBadInput)) {
    return keep(std::move(decision),
                fmt::format("keep {}: {}", to_string(input.current), found.error().message));
  }
  if (!found) return found.error();
  enter(rivals, *std::move(found), input);
  if (rivals.plan.stages == input.current.stages &&
      rivals.plan.schedule == input.current.schedule && rivals.plan.order == input.current.order) {
    decision = keeping(input, rivals.planned);
    decision.recomputed = rivals.recomputed;
    std::string reason =
        fmt::format("keep {}: it is the {} cut, {} a step, imbalance {:.1f} %",
                    to_string(input.current), name(options.balancer),
                    format_seconds(decision.current_step_s), percent(decision.imbalance_before));
    return keep(std::move(decision), std::move(reason));
  }
  compare(decision, rivals, input);
  return weigh(std::move(decision), rivals, input, options);
}

Expected<Decision> vacate(const PolicyInput& input, const std::vector<Rank>& kept,
                          const PolicyOptions& options) {
  DYNMO_TRY(validate(input, options));
  DYNMO_ASSIGN(Rivals rivals, rivals_of(input));
  plan::BalanceProblem problem = problem_of(input, options);
  auto found = plan::propose_on(kept, options.balancer, problem, options.propose);
  if (!found && found.error().code == ErrorCode::kBadInput) {
    problem.schedule = schedule::ScheduleKind::k1F1B;
    found = plan::propose_on(kept, options.balancer, problem, options.propose);
  }
  if (!found) return found.error();
  enter(rivals, *std::move(found), input);
  Decision decision = keeping(input, rivals.current);
  compare(decision, rivals, input);
  std::string reason = fmt::format(
      "move {} to {}, as ranks leave: {}, {} -> {} ranks, {} layers, {}", to_string(input.current),
      to_string(rivals.plan), gain_text(decision), decision.ranks_before, decision.ranks_after,
      decision.migration.moves.size(), format_bytes(decision.migration.bytes()));
  return take(std::move(decision), rivals, std::move(reason));
}

Expected<Decision> after_loss(const PolicyInput& input, const PolicyOptions& options) {
  DYNMO_TRY(validate(input, options));
  plan::BalanceProblem problem = problem_of(input, options);
  problem.current = nullptr;
  const plan::ProposeOptions quick{.rank_order = options.propose.rank_order};
  auto found = plan::propose(plan::Balancer::kOptimal, problem, quick);
  if (!found && problem.schedule != schedule::ScheduleKind::k1F1B) {
    problem.schedule = schedule::ScheduleKind::k1F1B;
    problem.stages_per_rank = 1;
    found = plan::propose(plan::Balancer::kOptimal, problem, quick);
  }
  if (!found) return found.error();
  Decision decision;
  decision.migrate = true;
  decision.plan = std::move(found->plan);
  decision.plan.generation = input.current.generation + 1;
  decision.recomputed = std::move(found->recomputed);
  decision.current_step_s = decision.planned_step_s = found->evaluation.step_time_s;
  decision.imbalance_before = decision.imbalance_after = found->evaluation.imbalance;
  decision.ranks_before = ranks_used(input.current);
  decision.ranks_after = ranks_used(decision.plan);
  decision.reason = fmt::format("move {} to {}, as ranks were lost: {} a step, {} -> {} ranks",
                                to_string(input.current), to_string(decision.plan),
                                format_seconds(decision.planned_step_s), decision.ranks_before,
                                decision.ranks_after);
  return decision;
}

}  // namespace dynmo::control
