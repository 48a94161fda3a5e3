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
      first_{std::move(first)} {}

Expected<void> OtherPlans::choose_recomputed(Choice& choice, const cost::ModelCost& model) const {
  const plan::Recompute how = recompute_of(job_.scenario);
  if (how == plan::Recompute::kNone) return {};
  DYNMO_ASSIGN(plan::Judged judged,
               plan::judge(how, choice.plan,
                           {model, newest_.grid().planned, job_.scenario.training.micro_batches}));
  choice.recomputed = std::move(judged.recomputed);
  return {};
}

Expected<void> OtherPlans::add(const cost::ModelCost& model) {
  const bool others_frozen = !best_ || model.frozen_layers() != model_.frozen_layers();
  if (others_frozen) DYNMO_TRY(choose_recomputed(first_, model));
  Choice before = best_.value_or(first_);
  if (others_frozen) DYNMO_TRY(choose_recomputed(before, model));
  if (!best_ || !(model == model_)) {
    std::vector<int> all(static_cast<std::size_t>(job_.scenario.cluster.pipeline_ranks));
    std::iota(all.begin(), all.end(), 0);
    Choice best;
    DYNMO_ASSIGN(best.plan, propose(job_.scenario, policy_, model, newest_.grid().planned, all, 0));
    DYNMO_TRY(choose_recomputed(best, model));
    best_ = std::move(best);
    model_ = model;
  }
  DYNMO_ASSIGN(const StepMeasure* kept, kept_.step(first_.plan, model, first_.recomputed));
  DYNMO_ASSIGN(const StepMeasure* newest, newest_.step(best_->plan, model, best_->recomputed));
  DYNMO_ASSIGN(const StepMeasure* past, past_.step(before.plan, model, before.recomputed));
  times_.kept_s += kept->step_s;
  times_.best_s += newest->step_s;
  times_.past_s += past->step_s;
  return {};
}

std::optional<Shares> shares_of(const RunResult& run) {
  if (!run.others || !(run.others->kept_s > run.others->best_s)) return std::nullopt;
  const OtherTimes& others = *run.others;
  const auto share = [&others](double seconds, double bound) {
    return others.kept_s > bound ? (others.kept_s - seconds) / (others.kept_s - bound) : 0;
  };
  return Shares{.cuts = share(run.time.train_s, others.best_s),
                .whole = share(run.time.total_s(), others.best_s),
                .past = share(run.time.train_s, others.past_s)};
}

}  // namespace dynmo::scenario
