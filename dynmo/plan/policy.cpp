// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/policy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "dynmo/plan/evaluate.h"

namespace dynmo::plan {
namespace {

constexpr double kAssumedBytesPerSecond = 1e9;

Expected<void> validate(const PolicyInput& input, const PolicyOptions& options) {
  const std::array<std::pair<std::string_view, double>, 7> values = {{
      {"relative_noise", input.relative_noise},
      {"horizon_steps", input.horizon_steps},
      {"bytes_per_s", input.bytes_per_s},
      {"fixed_cost_s", input.fixed_cost_s},
      {"minimum_gain", options.minimum_gain},
      {"noise_factor", options.noise_factor},
      {"known_change_noise_factor", options.known_change_noise_factor},
  }};
  for (const auto& [field, value] : values) {
    if (std::isfinite(value) && value >= 0) continue;
    return make_error(ErrorCode::kBadInput, "policy: {} is {}, wanted a number, 0 or more", field,
                      value);
  }
  return {};
}

// Sum of squares of the layers' work on the slowest rank of the plan, over its speed.
double bottleneck_squares(const Plan& plan, const PolicyInput& input) {
  const auto times = rank_times_s(plan, input.model, input.cluster, input.micro_batches);
  const auto slowest = std::max_element(times.begin(), times.end()) - times.begin();
  const std::vector<double> work = cost::layer_work_s(input.model, input.micro_batches);
  const double speed = input.cluster.ranks[static_cast<std::size_t>(slowest)].speed;
  double squares = 0;
  for (const PlanStage& stage : plan.stages) {
    if (stage.rank.value != slowest) continue;
    for (int i = stage.layers.first.value; i < stage.layers.end(); ++i) {
      const double time = work[static_cast<std::size_t>(i)] / speed;
      squares += time * time;
    }
  }
  return squares;
}

double percent(double share) { return 100 * share; }

Decision keep(Decision decision, std::string reason) {
  decision.migrate = false;
  decision.reason = std::move(reason);
  return decision;
}

Decision take(Decision decision, Plan plan, std::string reason) {
  decision.migrate = true;
  decision.plan = std::move(plan);
  decision.reason = std::move(reason);
  return decision;
}

// The gain, "1.20 ms -> 1.00 ms a step (16.7 %)".
std::string gain_text(const Decision& decision) {
  const double gain = decision.current_step_s - decision.planned_step_s;
  return fmt::format("{} -> {} a step ({:.1f} %)", format_seconds(decision.current_step_s),
                     format_seconds(decision.planned_step_s),
                     percent(gain / decision.current_step_s));
}

struct Proposal {
  Plan plan;
  Evaluation current;
  Evaluation planned;
};

Decision weigh(Decision decision, const Proposal& proposal, const PolicyInput& input,
               const PolicyOptions& options) {
  const std::string cuts =
      fmt::format("{} to {}", to_string(input.current), to_string(proposal.plan));
  if (!fits_memory(proposal.planned.result, input.cluster)) {
    return keep(std::move(decision),
                fmt::format("keep {}: {} would not fit the memory", to_string(input.current),
                            to_string(proposal.plan)));
  }
  if (!fits_memory(proposal.current.result, input.cluster)) {
    std::string reason = fmt::format("move {}: the current plan no longer fits the memory, {}",
                                     cuts, gain_text(decision));
    return take(std::move(decision), proposal.plan, std::move(reason));
  }
  const double gain = decision.current_step_s - decision.planned_step_s;
  const auto refuse = [&](std::string why) {
    return keep(decision, fmt::format("keep {}: {} would give {}, {}", to_string(input.current),
                                      to_string(proposal.plan), gain_text(decision), why));
  };
  if (!(gain > options.minimum_gain * decision.current_step_s)) {
    return refuse(fmt::format("wanted more than {:.1f} %", percent(options.minimum_gain)));
  }
  const double factor =
      input.change == Change::kKnown ? options.known_change_noise_factor : options.noise_factor;
  if (!(gain > factor * decision.noise_s)) {
    return refuse(
        fmt::format("within {:.3g} x the noise of {}", factor, format_seconds(decision.noise_s)));
  }
  if (!(decision.gain_s > decision.cost_s)) {
    return refuse(fmt::format("{} over {:.0f} steps, less than the {} of moving {} layers, {}",
                              format_seconds(decision.gain_s), input.horizon_steps,
                              format_seconds(decision.cost_s), decision.migration.moves.size(),
                              format_bytes(decision.migration.bytes())));
  }
  std::string reason = fmt::format(
      "move {}: {}, imbalance {:.1f} -> {:.1f} %, {} layers, {}, gains {} for {}", cuts,
      gain_text(decision), percent(decision.imbalance_before), percent(decision.imbalance_after),
      decision.migration.moves.size(), format_bytes(decision.migration.bytes()),
      format_seconds(decision.gain_s), format_seconds(decision.cost_s));
  return take(std::move(decision), proposal.plan, std::move(reason));
}

}  // namespace

Expected<Decision> decide(const PolicyInput& input, const PolicyOptions& options) {
  DYNMO_TRY(validate(input, options));
  Proposal proposal;
  DYNMO_ASSIGN(proposal.current,
               evaluate(input.current, input.model, input.cluster, input.micro_batches));
  Decision decision;
  decision.plan = input.current;
  decision.current_step_s = decision.planned_step_s = proposal.current.step_time_s;
  decision.imbalance_before = decision.imbalance_after = proposal.current.imbalance;

  const auto counts = balance(
      options.balancer, {input.model, input.cluster, input.micro_batches, input.current.schedule});
  if (!counts && counts.error().code == ErrorCode::kInfeasible) {
    return keep(std::move(decision),
                fmt::format("keep {}: {}", to_string(input.current), counts.error().message));
  }
  if (!counts) return counts.error();
  proposal.plan = make_plan(*counts, input.current.schedule, input.current.generation + 1);
  if (proposal.plan.stages == input.current.stages) {
    std::string reason =
        fmt::format("keep {}: it is the {} cut, {} a step, imbalance {:.1f} %",
                    to_string(input.current), name(options.balancer),
                    format_seconds(decision.current_step_s), percent(decision.imbalance_before));
    return keep(std::move(decision), std::move(reason));
  }
  DYNMO_ASSIGN(proposal.planned,
               evaluate(proposal.plan, input.model, input.cluster, input.micro_batches));
  decision.planned_step_s = proposal.planned.step_time_s;
  decision.imbalance_after = proposal.planned.imbalance;
  decision.migration = difference(input.current, proposal.plan, input.model);
  decision.gain_s = (decision.current_step_s - decision.planned_step_s) * input.horizon_steps;
  const double bandwidth = input.bytes_per_s > 0 ? input.bytes_per_s : kAssumedBytesPerSecond;
  decision.cost_s =
      static_cast<double>(decision.migration.bytes().value) / bandwidth + input.fixed_cost_s;
  decision.noise_s = input.relative_noise * input.micro_batches *
                     std::sqrt(bottleneck_squares(input.current, input) +
                               bottleneck_squares(proposal.plan, input));
  return weigh(std::move(decision), proposal, input, options);
}

}  // namespace dynmo::plan
