// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "dynmo/plan/evaluate.h"
#include "dynmo/scenario/replay_impl.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::scenario {
namespace {

double imbalance_of(const plan::Plan& plan, const cost::ModelCost& model, const Grid& grid,
                    int micro_batches) {
  double most = 0;
  double sum = 0;
  double ranks = 0;
  for (const ReplicaKind& kind : grid.kinds) {
    const auto times = plan::rank_times_s(plan, {model, kind.cluster, micro_batches});
    most = std::max(most, *std::max_element(times.begin(), times.end()));
    for (std::size_t r = 0; r < times.size(); ++r) {
      if (plan.stages_of(Rank{static_cast<std::int32_t>(r)}).empty()) continue;
      sum += times[r] * kind.count;
      ranks += kind.count;
    }
  }
  return sum > 0 ? most * ranks / sum - 1 : 0;
}

double ideal_s(const cost::ModelCost& model, const cost::Cluster& cluster, int micro_batches) {
  double speeds = 0;
  for (const cost::ClusterRank& rank : cluster.ranks) speeds += rank.speed;
  const std::vector<double> work = cost::layer_work_s(model, micro_batches);
  return micro_batches * std::accumulate(work.begin(), work.end(), 0.0) / speeds;
}

int positions_in_use(const plan::Plan& plan) {
  std::vector<char> used(static_cast<std::size_t>(plan.ranks), 0);
  for (const plan::PlanStage& stage : plan.stages) used[stage.rank.index()] = 1;
  return static_cast<int>(std::count(used.begin(), used.end(), 1));
}

}  // namespace

void StepReplayer::set_grid(Grid grid) {
  grid_ = std::move(grid);
  last_.reset();
}

Expected<void> StepReplayer::prepare(const plan::Plan& plan, const cost::ModelCost& model) {
  const int frozen = model.frozen_layers();
  if (plan_ && *plan_ == plan && frozen_ == frozen) return {};
  // Checks all that does not change with the costs, and that costs are of a sane unit.
  DYNMO_TRY(plan::evaluate(plan, {model, grid_.planned, micro_batches_}));
  DYNMO_ASSIGN(const schedule::Schedule compute, plan::schedule_of(plan, micro_batches_, frozen));
  lowered_ = schedule::lower(compute);
  plan_ = plan;
  frozen_ = frozen;
  last_.reset();
  return {};
}

// The update of a step starts when the last rank of any replica has its gradients reduced. A
// reduction starts when the last replica of its stage is done. Both are maxima, so the step of the
// whole job is the longest step of any replica.
Expected<const StepMeasure*> StepReplayer::step(const plan::Plan& plan,
                                                const cost::ModelCost& model,
                                                const plan::LayerSet& again, Timelines timelines) {
  const bool keep = timelines == Timelines::kKept;
  DYNMO_TRY(prepare(plan, model));
  const bool same = last_ && model_ == model && again_ == again;
  if (same && (!keep || !last_->timeline.ranks.empty())) return &*last_;
  DYNMO_TRY(cost::validate(model, micro_batches_));
  const cost::ModelCost run = plan::recomputed(model, again);
  const std::vector<sim::StageCost> costs = plan::stage_costs(plan, run, grid_.planned);
  std::vector<Bytes> peaks;
  if (!again.empty()) {
    DYNMO_ASSIGN(peaks, plan::peak_memory(plan, model, micro_batches_, again));
  }
  StepMeasure measure{.ideal_step_s = ideal_s(run, grid_.planned, micro_batches_),
                      .positions = positions_in_use(plan)};
  double busy = 0;
  for (const ReplicaKind& kind : grid_.kinds) {
    DYNMO_ASSIGN(sim::SimResult result,
                 sim::simulate(lowered_, costs, kind.cluster, {.timeline = keep}));
    const double step_s = to_seconds(result.step_time);
    for (const sim::RankUsage& rank : result.ranks) busy += to_seconds(rank.busy) * kind.count;
    for (std::size_t r = 0; r < peaks.size(); ++r) result.ranks[r].peak_memory = peaks[r];
    measure.fits = measure.fits && plan::fits_memory(result, kind.cluster);
    if (step_s < measure.step_s) continue;
    measure.step_s = step_s;
    measure.timeline = std::move(result.timeline);
  }
  const double whole = measure.step_s * measure.positions * grid_.replicas;
  measure.bubble = whole > 0 ? 1 - busy / whole : 0;
  measure.imbalance = imbalance_of(plan, run, grid_, micro_batches_);
  model_ = model;
  again_ = again;
  last_ = std::move(measure);
  return &*last_;
}

}  // namespace dynmo::scenario
