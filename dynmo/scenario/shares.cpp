// SPDX-License-Identifier: Apache-2.0
#include <numeric>
#include <utility>
#include <vector>

#include "dynmo/scenario/planning_impl.h"
#include "dynmo/scenario/shares_impl.h"

namespace dynmo::scenario {

OtherPlans::OtherPlans(const Job& job, const Policy& policy, const Grid& grid, plan::Plan first)
    : job_(job),
      policy_(policy),
      kept_(grid, job.scenario.training.micro_batches),
      newest_(grid, job.scenario.training.micro_batches),
      past_(grid, job.scenario.training.micro_batches),
      first_(std::move(first)) {}

Expected<void> OtherPlans::add(const cost::ModelCost& model) {
  const plan::Plan before = best_.value_or(first_);
  if (!best_ || !(model == model_)) {
    std::vector<int> all(static_cast<std::size_t>(job_.scenario.cluster.pipeline_ranks));
    std::iota(all.begin(), all.end(), 0);
    DYNMO_ASSIGN(best_, propose(job_.scenario, policy_, model, newest_.grid().planned, all, 0));
    model_ = model;
  }
  DYNMO_ASSIGN(const StepMeasure* kept, kept_.step(first_, model));
  DYNMO_ASSIGN(const StepMeasure* newest, newest_.step(*best_, model));
  DYNMO_ASSIGN(const StepMeasure* past, past_.step(before, model));
  times_.kept_s += kept->step_s;
  times_.best_s += newest->step_s;
  times_.past_s += past->step_s;
  return {};
}

}  // namespace dynmo::scenario
