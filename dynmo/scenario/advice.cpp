// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/advice.h"

#include <utility>

#include "dynmo/scenario/grid.h"

namespace dynmo::scenario {
namespace {

constexpr std::int64_t kAdvisedSteps = 4;

plan::Costs costs_of(const dynamism::LoadModel& load, std::int64_t steps) {
  plan::Costs costs;
  for (std::int64_t i = 0; i < kAdvisedSteps; ++i) {
    costs.push_back(load.at((2 * i + 1) * steps / (2 * kAdvisedSteps)));
  }
  return costs;
}

// The costs of a shape are made again. The head of other costs is divided evenly.
Expected<plan::Costs> sliced_costs(const Job& job, const plan::Costs& costs, std::int64_t slices) {
  const Scenario& scenario = job.scenario;
  if (scenario.model.profile.empty() && scenario.dynamism.trace.empty()) {
    Scenario other = scenario;
    other.model.shape.head_slices = slices;
    DYNMO_ASSIGN(const Job sliced, make_job(other));
    return costs_of(*sliced.load, scenario.training.steps);
  }
  plan::Costs sliced;
  for (const cost::ModelCost& model : costs) {
    DYNMO_ASSIGN(cost::ModelCost one, plan::with_head_slices(model, slices));
    sliced.push_back(std::move(one));
  }
  return sliced;
}

}  // namespace

std::optional<plan::Advice> advise(const Job& job) {
  const Scenario& scenario = job.scenario;
  const auto kind = schedule::parse_schedule_kind(scenario.training.schedule);
  const auto grid = make_grid(scenario.cluster, job.device, scenario.cluster.data_parallel);
  if (!kind || !grid) return std::nullopt;
  const plan::Costs costs = costs_of(*job.load, scenario.training.steps);
  auto advice = plan::advise(
      {.models = costs,
       .cluster = grid->planned,
       .micro_batches = scenario.training.micro_batches,
       .schedule = *kind,
       .head_slices = scenario.model.shape.head_slices,
       .sliced = [&](std::int64_t slices) { return sliced_costs(job, costs, slices); }});
  if (advice && !scenario.events.empty()) advice->fewest.reset();
  return advice;
}

}  // namespace dynmo::scenario
