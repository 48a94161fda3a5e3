// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/comparison.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "dynmo/control/profiler.h"
#include "dynmo/core/digest.h"
#include "dynmo/dynamism/freezing/schedule.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/simulated_optimum.h"

namespace dynmo::train {
namespace {

// Returns the costs that were measured in a step: those of one round, if it had several.
cost::ModelCost costs_of(const observe::StepEntry& step, const cost::ModelCost& known, int rounds) {
  control::Profiler profiler(known, 1);
  profiler.add(step.layers, plan::owners(step.plan));
  cost::ModelCost costs = *profiler.costs(step.frozen_layers);
  for (cost::LayerCost& layer : costs.layers) layer.update_s /= rounds;
  return costs;
}

// The steps of a comparison, and the replays for them. The other ranks wait meanwhile, for no
// longer than pipeline.timeout_s.
constexpr std::size_t kMaxSteps = 256;
constexpr std::int64_t kMaxReplays = 1'000'000;

// Returns the least step time of all cuts. Once there are too many cuts, it returns a bound from
// then on.
Expected<double> best_step_s(const plan::Costs& costs, schedule::ScheduleKind kind,
                             std::int64_t& replays, bool& is_bound) {
  if (!is_bound && replays < kMaxReplays) {
    DYNMO_ASSIGN(const std::optional<plan::SimulatedOptimum> best,
                 plan::simulated_optimum(costs, kind));
    if (best) {
      replays += best->simulated;
      return best->step_time_s;
    }
  }
  is_bound = true;
  return plan::step_time_bound_s(costs);
}

// Returns whether simulated_optimum() knows all cuts for this kind.
bool one_stage_a_rank(schedule::ScheduleKind kind) {
  return schedule::traits(kind).layout == schedule::StageLayout::kOneARank;
}

}  // namespace

Expected<Comparison> compare(const observe::RunHistory& baseline,
                             const observe::RunHistory& balanced, const cost::ModelCost& known,
                             int micro_batches, int accumulation, int ranks,
                             const GivenCosts& given) {
  Comparison comparison{.speedup = balanced.tokens_per_s() / baseline.tokens_per_s()};
  const cost::Cluster cluster = cost::equal_ranks(ranks);
  double baseline_s = 0;
  double best_s = 0;
  double balanced_s = 0;
  const auto costs_in = [&](const observe::StepEntry& step) {
    return given ? given(step.step) : costs_of(step, known, accumulation);
  };
  std::int64_t replays = 0;
  const std::size_t steps = std::min(baseline.sample().size(), balanced.sample().size());
  const std::size_t stride = (steps + kMaxSteps - 1) / kMaxSteps;
  for (std::size_t i = 0; i < steps; i += stride) {
    const observe::StepEntry& step = baseline.sample()[i];
    DYNMO_ASSIGN(const plan::Evaluation evaluation,
                 plan::evaluate(step.plan, {costs_in(step), cluster, micro_batches}));
    baseline_s += evaluation.step_time_s;
    if (given) {
      DYNMO_ASSIGN(
          const plan::Evaluation moved,
          plan::evaluate(balanced.sample()[i].plan, {given(step.step), cluster, micro_batches}));
      balanced_s += moved.step_time_s;
    }
    if (!one_stage_a_rank(step.plan.schedule)) continue;
    DYNMO_ASSIGN(const double best,
                 best_step_s({costs_in(balanced.sample()[i]), cluster, micro_batches},
                             step.plan.schedule, replays, comparison.best_is_bound));
    best_s += best;
  }
  if (balanced_s > 0) comparison.cuts_speedup = baseline_s / balanced_s;
  comparison.best_speedup =
      best_s > 0 ? baseline_s / best_s : std::numeric_limits<double>::quiet_NaN();
  return comparison;
}

}  // namespace dynmo::train
